"""A test must use the model of its checkpoint, and a resumed training must have the options of the earlier one."""

from itertools import permutations
from pathlib import Path

import pytest
import torch
import yaml
from pytorch_lightning.callbacks import EMAWeightAveraging, GradientAccumulationScheduler

from kerple.base.errors import UserError
from kerple.cli.main import main
from kerple.config.checkpoint_agreement import check_resumption
from kerple.config.untrusted_checkpoints import CONFIG, load
from kerple.config.user_code_digests import SOURCE_DIGESTS, source_digests
from tests.cli.tiny import complaint, fit


def refused(arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail without writing a checkpoint, and return its error message."""
    line = complaint(capsys, *arguments, f"--output={folder}/run")
    assert not list((folder / "run").rglob("*.ckpt"))
    return line


EDIT = """
from pathlib import Path
from pytorch_lightning import Callback
class Edit(Callback):
    def on_train_start(self, trainer, pl_module):
        Path(__file__).write_text("class Edit(")
"""


@pytest.mark.slow
def test_a_fit_stores_the_digest_of_the_code_that_it_began_with(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    name = f"edit_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(EDIT)
    before = source_digests({"class_path": f"{name}.Edit"})
    checkpoint = fit(tmp_path, f"--trainer.callbacks+={name}.Edit")
    assert load(checkpoint)[SOURCE_DIGESTS] == before


@pytest.mark.slow
def test_a_test_refuses_another_architecture_and_strategies_with_new_weights(genuine, tmp_path, capsys):
    (tmp_path / "more.yaml").write_text("model: {dim: 16}")
    parts = {f"--config={tmp_path}/more.yaml": "model.dim: ", "--model.position=T5": "network.positions.0"}
    parts["--model.position=KerplePower"] = "'KerpleLog' -> 'KerplePower'"  # whose parameters have the same names
    parts["--model.position=SelfExtend"] = "SelfExtend of RoPE, which differs from the strategy of the trained model"
    for option, part in parts.items():
        assert part in refused(["test", f"--ckpt_path={genuine}", option], tmp_path, capsys)


@pytest.mark.slow
def test_a_test_accepts_other_data_and_strategies_without_new_weights(genuine, tmp_path, capsys):
    options = ["--model.position=NoPE", "--model.attention=reference", "--data.length=32"]
    main(["test", f"--ckpt_path={genuine}", f"--output={tmp_path}/run", *options])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "another strategy" in line]
    assert "model.position." in line
    tested = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert tested["model"]["position"]["class_path"].endswith("NoPE")
    assert tested["data"]["init_args"]["length"] == 32


@pytest.mark.parametrize("callbacks", ["[]", "ModelCheckpoint"])
def test_a_test_without_a_measurement_is_refused(callbacks, genuine, tmp_path, capsys):
    line = refused(["test", f"--ckpt_path={genuine}", f"--trainer.callbacks={callbacks}"], tmp_path, capsys)
    assert line.startswith("error: trainer.callbacks: got none, expected one measurement or more")


OTHERS = "seed_everything=4 data.batch_size=4 trainer.max_steps=20 model.lr=0.1"


@pytest.mark.parametrize("option", OTHERS.split())
def test_resumption_refuses_other_training_options(option, genuine, tmp_path, capsys):
    config = f"--config={genuine.parents[2]}/tiny.yaml"
    line = refused(["fit", config, f"--ckpt_path={genuine}", f"--{option}"], tmp_path, capsys)
    assert "samples" in line if "batch" in option else option.partition("=")[0].rpartition(".")[2] in line


def test_resumption_refuses_another_schedule_of_accumulation():
    schedules = [{0: 4}, {0: 4, 2: 8}, None]
    configs = [{"trainer": {"strategy": "auto"}} for _ in schedules]
    for config, schedule in zip(configs, schedules, strict=True):
        callback = {"class_path": "pytorch_lightning.callbacks.GradientAccumulationScheduler"}
        callback["init_args"] = {"scheduling": schedule}
        config["trainer"]["callbacks"] = [callback] if schedule else None
        check_resumption("last.ckpt", {CONFIG: config}, config, 8)
    for before, now in permutations(configs, 2):
        with pytest.raises(UserError, match="scheduling of GradientAccumulationScheduler: "):
            check_resumption("last.ckpt", {CONFIG: before}, now, 8)


def test_resumption_refuses_another_averaging_of_weights():
    every = [("EMAWeightAveraging", {"decay": 0.9}), ("EMAWeightAveraging", {"decay": 0.1})]
    every += [("StochasticWeightAveraging", {"swa_lrs": 0.01}), ("MyWeightAveraging", None), None]
    configs = [{"trainer": {"strategy": "auto", "callbacks": []}} for _ in every]
    for config, averaging in zip(configs, every, strict=True):
        if averaging is not None:
            path, options = f"pytorch_lightning.callbacks.{averaging[0]}", averaging[1]
            given = {} if options is None else {"init_args": {**options, "device": "cpu"}}
            config["trainer"]["callbacks"].append({"class_path": path, **given})
    for before, now in permutations(configs, 2):
        with pytest.raises(UserError, match="another training: averaging of weights: "):
            check_resumption("last.ckpt", {CONFIG: before}, now, 8)
    moved = yaml.safe_load(yaml.safe_dump(configs[0]).replace("device: cpu", "device: cuda"))
    check_resumption("last.ckpt", {CONFIG: configs[0]}, moved, 8)


class Slower(EMAWeightAveraging): ...


class Growing(GradientAccumulationScheduler): ...


@pytest.mark.parametrize(
    ("kind", "option", "values"), [(Slower, "decay", (0.9, 0.99)), (Growing, "scheduling", ({0: 1}, {0: 2}))]
)
def test_resumption_refuses_other_options_of_a_users_averaging_or_schedule(kind, option, values):
    path = f"{kind.__module__}.{kind.__name__}"
    callbacks = [[{"class_path": path, "init_args": {option: value}}] for value in values]
    before, now = ({"trainer": {"strategy": "auto", "callbacks": each}} for each in callbacks)
    with pytest.raises(UserError, match=r"another training: (averaging|scheduling) of "):
        check_resumption("last.ckpt", {CONFIG: before}, now, 8)


CHANGED = "seed length samples sections packing mixture examples train_length held_out task"
CHANGED += " mask_documents restart_positions score_first_targets"


@pytest.mark.parametrize("option", CHANGED.split())
def test_resumption_refuses_every_option_that_changes_samples_or_their_losses(option):
    before, now = ({"data": {"init_args": {option: value}}, "trainer": {"strategy": "auto"}} for value in (1, 2))
    check_resumption("last.ckpt", {CONFIG: before}, before, None)
    with pytest.raises(UserError, match=f"another training: data.init_args.{option}: 1 -> 2; use the earlier options"):
        check_resumption("last.ckpt", {CONFIG: before}, now, None)


def test_resumption_refuses_sharding_after_a_run_without_it_and_another_data_module():
    single, sharded, other = (
        {"data": {"class_path": data}, "trainer": {"strategy": strategy}}
        for data, strategy in (("TaskData", "ddp"), ("TaskData", {"class_path": "ShardedBlocks"}), ("Mine", "ddp"))
    )
    with pytest.raises(UserError, match="without sharding -> with sharding"):
        check_resumption("last.ckpt", {CONFIG: single}, sharded, None)
    check_resumption("last.ckpt", {CONFIG: sharded}, single, None)
    with pytest.raises(UserError, match=r"data\.class_path: 'TaskData' -> 'Mine'"):
        check_resumption("last.ckpt", {CONFIG: single}, other, None)


def test_resumption_accepts_another_division_of_the_batch_and_prints_differences(genuine, tmp_path, capsys):
    config = [f"--config={genuine.parents[2]}/tiny.yaml", f"--ckpt_path={genuine}", f"--output={tmp_path}/run"]
    main(["fit", *config, "--data.batch_size=1", "--trainer.accumulate_grad_batches=2"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "other options" in line]
    assert "trainer.gradient_clip_val: 1.5 -> None" in line
    assert "data.init_args.batch_size: 2 -> 1" in line


@pytest.mark.parametrize("change", [pytest.param({"loops": 3}, marks=pytest.mark.slow), {"state_dict": {}}, None])
def test_damaged_checkpoints_give_one_error_that_names_the_file(change, genuine, tmp_path, capsys):
    content = {} if change is None else torch.load(genuine, weights_only=True) | change
    torch.save(content, tmp_path / "changed.txt")
    options = [f"--config={genuine.parents[2]}/tiny.yaml", f"--ckpt_path={tmp_path}/changed.txt"]
    assert "changed.txt" in refused(["fit", *options], tmp_path, capsys)
