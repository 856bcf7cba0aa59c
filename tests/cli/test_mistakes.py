"""Mistakes of users. Each is one line on standard error, with exit status 2."""

import errno
import logging
import os
import sys
from unittest.mock import Mock

import pytest
import torch
import yaml

from kerple.base.errors import UserError
from kerple.cli.main import DEMO, main
from kerple.training.feasibility import LAUNCHERS
from tests.cli.tiny import TINY, complaint

SHARDS = ["--data=TokenShards", f"--data.corpus={__file__}", "--data.split_fractions=[1, 0, 0]"]

LEARNED, COMBINED, ROPE = (["check", f"--model.position={name}"] for name in ("Learned", "Combined", "RoPE"))
SAVER = ["plan", "--trainer.callbacks+=ModelCheckpoint"]

OURS = """from kerple.positions import Position
from pytorch_lightning import LightningDataModule
class Wrong(Position):
    def __init__(self, shape): super().__init__()
    def bias(self, distance): return distance / (1 // 0)
class OneRow(Wrong):
    def bias(self, distance): return distance[None]
class Mine: ...
class Unbuilt(Position):
    def __init__(self, shape): {}["rate"]
class Abstract(Position): ...
def build(groups): ...
class Data(LightningDataModule):
    vocabulary = 9
    def __init__(self, length: int = 4): self.length = length
from kerple.measure.measure import Measure
from kerple.tasks import Copy
from torch.optim import SGD
class Shards(LightningDataModule):
    def __init__(self, vocabulary: int, length: int): open("nowhere.bin")
class Words(Copy):
    def __init__(self, symbols: int = 2): "ab"[symbols]
class Probe(Measure):
    measure = None
    def __init__(self): {}["blocks"]
class Required(SGD):
    def __init__(self, params, lr: float, momentum: float = 0.9): super().__init__(params, lr, momentum)
"""


def config(folder, **sections):
    (folder / "config.yaml").write_text(yaml.safe_dump(TINY | sections))
    return f"--config={folder}/config.yaml"


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--model.head_dim=-8"], ["model.head_dim: got -8"]),
        (["--model.heads=3"], ["heads: got 3"]),  # raised when the class is built
        (["--data.batch_size=0"], ["error: data.batch_size: got 0"]),  # one of the types of this option is a class
        (["--data.train_length=0", "--data.test_lengths=null"], ["data.train_length: got 0"]),
        (["--data.test_lengths=[]"], ["data.test_lengths: got none, expected one length or more"]),
        (["--data.lenght=3"], ["lenght", "TaskData; did you mean length?"]),
        (["--model.layer=3"], ["--model.layer=3; did you mean model.layers?"]),  # no abbreviation
        (["--conf=x", "--model.pos=Y"], ["did you mean config and model.position?"]),  # no abbreviations
        (["--model.position=mine.Broken"], ["got mine.Broken: No module named 'nowhere' (", "mine.py:1)"]),
        (["--model.position=ours.Mine"], ["expected a subclass of kerple.positions.Position"]),
        (["--model.position=ours.Wrong"], ["ours.py:5: ZeroDivisionError"]),
        (["--model.position=ours.Unbuilt"], ["ours.py:10: KeyError: 'rate'"]),
        pytest.param(
            ["--model.position=ours.OneRow"],
            ["ours.OneRow.bias: got shape (1, 6), expected (2, 6), one row per head"],
            marks=pytest.mark.slow,
        ),
        (["--model.position=KerpleLog", "--model.position.flor=3"], ["flor", "KerpleLog; did you mean floor?"]),
        (["--data=ours.Shards"], ["ours.py:20: FileNotFoundError", "nowhere.bin"]),
        (["--data.task=ours.Words"], ["ours.py:22: IndexError: string index out of range"]),
        (["--trainer.callbacks=ours.Probe"], ["ours.py:25: KeyError: 'blocks'"]),
        (["--data=ours.Data"], ["data: got ours.Data, whose __init__ has no vocabulary, expected the arguments"]),
        (["--data.seed=-1"], ["data.seed: got -1"]),
        pytest.param(
            ["--model.optimizer=ours.Required", "--model.optimizer.lr=0.5"],
            ["lr: got 0.5, which has no effect"],
            marks=pytest.mark.slow,
        ),
        (["--model.optimizer=ours.build"], ["model.optimizer: got ", "expected a mapping of options, or a class"]),
        (["--trainer.callbacks={class_path: Extrapolation, init_args: {lengths: [9]}}"], ["Extrapolation: data: got"]),
        (["--data=TokenShards", "--data.corpus=nowhere"], ["data.corpus: got 'nowhere'"]),
        (["--trainer.overfit_batches=1"], ["trainer.overfit_batches"]),
        (["--trainer.gradient_clip_val=-1"], ["trainer.gradient_clip_val: got -1"]),  # would reverse the gradient
        (["--trainer.accumulate_grad_batches=0"], ["trainer.accumulate_grad_batches: got 0"]),
        (["--trainer.limit_train_batches=0"], ["trainer.limit_train_batches: got 0"]),
        pytest.param(["--trainer.precision=16-true"], ["trainer.precision: got 16-true"], marks=pytest.mark.slow),
        (["--model.betas=[0.9,1.5]"], ["betas: got (0.9, 1.5)"]),
        (["--run_dir=here"], ["error: run_dir: this option is now --output"]),
        (["--seed_everything=-1"], ["seed_everything", "-1"]),
        (["--trainer.logger=CSVLogger"], ["trainer.logger: CSVLogger: the following arguments are required: save_dir"]),
        (["--model.position=ours.Abstract"], ["Abstract: Can't instantiate abstract class"]),
        (["--trainer.logger=CometLogger"], ["comet"]),  # a package that is not installed
        (
            ["--model.layers=1000000000000"],
            ["model.layers, model.dim or model.hidden: at least ", "GiB are needed, this machine has "],
        ),
        (["--data.batch_size=1000000000000"], ["data.batch_size or data.length: at least "]),
        (["--data.workers=50000"], ["data.workers: got 50000, expected 0 to "]),
        (["--trainer.default_root_dir=x"], ["trainer.default_root_dir: got a folder, expected --output"]),
        (["--trainer.num_nodes=2"], ["trainer.num_nodes: got 2, expected 1", "torchrun or srun"]),
        (["--ckpt_path=no-such.ckpt"], ["no-such.ckpt"]),
        ([f"--ckpt_path={'a' * 300}"], ["not a file"]),  # too long for a file name
        pytest.param(
            ["--trainer.val_check_interval=9", "--trainer.limit_val_batches=1"],
            ["trainer: `val_check_interval` (9)"],
            marks=pytest.mark.slow,
        ),
        ([*SHARDS, "--trainer.callbacks=[]", "--data.length=20000"], ["data.length: got 20000"]),  # at the first batch
        pytest.param(
            ["--model.optimizer=SGD", "--model.optimizer.lr=-1"],
            ["model.optimizer: SGD: ValueError: Invalid learning rate"],
            marks=pytest.mark.slow,
        ),
        (["--trainer.callbacks=LearningRateFinder"], ["trainer.callbacks: got LearningRateFinder", "set model.lr"]),
        # each step multiplies the matrices by 1 - lr · weight_decay = -1e9
        pytest.param(
            ["--model.lr=1000", "--model.weight_decay=1e6", "--model.warmup=0", "--trainer.max_steps=40"],
            ["not finite"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_mistakes_in_options_of_fit(options, parts, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ours", raising=False)
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "mine.py").write_text("import nowhere")
    (tmp_path / "ours.py").write_text(OURS)
    line = complaint(capsys, "fit", config(tmp_path), f"--output={tmp_path}/run", *options)
    assert all(part in line for part in parts), line
    assert not list((tmp_path / "run").rglob("*.ckpt"))
    assert (tmp_path / "run").exists() == ("not finite" in parts)  # so that the next run is not a second version


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "part"),
    [
        ("optimizer=SparseAdam", "model.optimizer: SparseAdam: RuntimeError: SparseAdam does not support dense"),
        ("optimizer=LBFGS", "model.optimizer: LBFGS: ValueError: LBFGS doesn't support per-parameter options"),
        ("optimizer=SGD --model.optimizer.lr=0.5", "model.optimizer.lr: got 0.5, which has no effect; set model.lr"),
        ("optimizer=Adam --model.optimizer={fused: true, foreach: true}", "`fused` and `foreach` cannot be `True`"),
        ("schedule=StepLR --model.schedule.step_size=0", "model.schedule: StepLR: ZeroDivisionError"),
        ("schedule=OneCycleLR --model.schedule.max_lr=1", "model.schedule: OneCycleLR: ValueError: You must define"),
        (
            "schedule=OneCycleLR --model.schedule.max_lr=1 --model.schedule.total_steps=1 --trainer.max_steps=2",
            "model.schedule.total_steps: got 1, expected trainer.max_steps, 2, or more",
        ),
        ("schedule=torch.optim.lr_scheduler.ReduceLROnPlateau", "model.schedule: got ReduceLROnPlateau"),
        ("compile={foo: 1}", "model.compile: TypeError: compile() got an unexpected keyword argument 'foo'"),
        ("compile={backend: foo}", "model.compile: InvalidBackend: Invalid backend: 'foo'"),
        (
            f"lr=1 --trainer.callbacks=ModelCheckpoint --trainer.callbacks.dirpath={__file__}/x",
            "error: trainer.callbacks: ",
        ),
        (
            f"lr=1 --trainer.logger=CSVLogger --trainer.logger.save_dir={__file__}/x",
            "error: trainer.logger: CSVLogger: ",
        ),
        (
            "lr=1 --trainer.callbacks=Throughput --trainer.callbacks+=Throughput",
            "trainer: Found more than one stateful",
        ),
        ("lr=1 --trainer.precision=transformer-engine", "error: trainer: Requirement 'transformer_engine"),
        ("lr=1 --trainer.strategy=ddp_spawn", "trainer.strategy: got ddp_spawn"),
    ],
)
def test_mistakes_in_classes_of_other_packages(options, part, tmp_path, capsys):
    options = [f"--{option}" for option in f"model.{options}".split(" --")]
    assert part in complaint(capsys, "fit", config(tmp_path), f"--output={tmp_path}/run", *options)


@pytest.mark.parametrize(
    ("sections", "part"),
    [
        ({"trainer": {"max_step": 3}}, "did you mean trainer.max_steps?"),
        ({"trainer": []}, "trainer: got []"),
        ({"model": TINY["model"] | {"position": ["RoPE"]}}, "model.position: got"),
        ({"model": TINY["model"] | {"position": "os.system"}}, "error: model.position: got "),
        ({"model": TINY["model"] | {"position": "KerpelLog"}}, "got KerpelLog, did you mean KerpleLog?"),
    ],
)
def test_mistakes_in_configuration_files(sections, part, tmp_path, capsys):
    assert part in complaint(capsys, "fit", config(tmp_path, **sections), f"--output={tmp_path}/run")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["check", "--model.position=0"], "model.position"),
        (
            [*LEARNED, "--model.position.beyond=foo"],
            "model.position.beyond: got foo, expected one of error, clamp, int",
        ),
        ([*ROPE, "--model.position.base=x"], "error: model.position.base: got x, expected float"),
        ([*ROPE, "--model.position.scaling.factor=x"], "scaling: got factor=x, expected one of pi"),
        ([*COMBINED, "--model.position.parts=[RoPE, Sinkk]"], "model.position.parts: got Sinkk, did you mean Sink?"),
        ([*COMBINED, "--model.position.parts=Sink"], "model.position.parts: got Sink, expected Sequence"),
        (
            ["check", "--model.position={class_path: RoPE, init_arg: {}}"],
            "error: model.position: Dict must include a class",
        ),
        (["check", "--model.position=LayerPattern", "--model.position.kinds={a: RoPEE}"], "kinds: got RoPEE, did you"),
        (
            ["plan", "--trainer.callbacks+=Extrapolatio"],
            "trainer.callbacks: got Extrapolatio, did you mean Extrapolation?",
        ),
        ([*SAVER, "--trainer.callbacks.save_top_k=x"], "error: trainer.callbacks.save_top_k: got x, expected int"),
        (
            ["plan", "--model.schedule=StepLR"],
            "model.schedule: StepLR: the following arguments are required: step_size",
        ),
        (["check", "my_file.Root"], "got my_file.Root, expected an option: --model.position my_file.Root"),
        (["plan", "--config=configs/paper.yaml", "--chips=TPU"], "chips: got 'TPU'"),
        (["plan", "--config={ckpt_path: last}"], "ckpt_path is not an option of this command; remove it"),
        (["plan", "--weights=./none"], "error: weights: got './none'"),
        (["plan", "--config=configs/paper.yaml", "--devices=8,64"], "devices: got 64, expected at most 32"),
        (["predikt"], "did you mean predict?"),
        (["fit", f"--config={__file__}"], f"error: {__file__}: "),
        (["fit", "--trainer.max_steps=1"], "error: the following arguments are required: --model.position, --data"),
        (["test", "--ckpt_path=run.py", "--weights=x"], "weights: got x"),
        (["prepare", "--data=kerple.tasks.TaskData", "--data.task=Copy", "--data.length=100"], "no shards to prepare"),
        (["prepare", "--data.corpus=none", "--address=a:1"], "prepare: address: got a:1 without Ray, expected --eng"),
        ([*DEMO, "--figure_strategies=none", "--cpus=8"], "compare: cpus: got 8 without Ray, expected --engine ray, "),
    ],
)
def test_mistakes_in_options_of_other_commands(arguments, part, capsys):
    assert part in complaint(capsys, *arguments)


@pytest.mark.slow
def test_bugs_and_debug_have_a_traceback_and_full_disks_or_gpus_one_line(tmp_path, monkeypatch, capsys):
    with pytest.raises(UserError, match="heads: got 3"):
        main(["fit", "--debug", "true", config(tmp_path), f"--output={tmp_path}/run", "--model.heads=3"])

    # like the error of TensorBoard's writer, without a file name
    errors = [OSError(errno.ENOSPC, "no space"), torch.OutOfMemoryError("20\nGiB."), ValueError("a bug of ours")]
    monkeypatch.setattr("kerple.training.random_state.RandomState.on_train_start", Mock(side_effect=errors))
    for part in (f"{tmp_path}/run: No space left", "20 GiB. Divide data.batch_size"):
        assert part in complaint(capsys, "fit", config(tmp_path), f"--output={tmp_path}/run")
    with pytest.raises(ValueError, match="a bug of ours"):
        main(["fit", config(tmp_path), f"--output={tmp_path}/run"])


def test_a_damaged_settings_file_of_a_preparation(tmp_path, capsys):
    (tmp_path / ".parts").mkdir()
    (tmp_path / ".parts" / "settings.json").write_text("[]")
    data = {"corpus": __file__, "directory": str(tmp_path)}  # without class_path and init_args
    assert ".parts/settings.json" in complaint(capsys, "prepare", config(tmp_path, data=data))


def test_a_missing_package_is_reported_with_its_install_command(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pandas", None)
    for module in ("kerple.cli.plan", "kerple.training.fit_cost"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert complaint(capsys, "plan").endswith("pip install '.[train]' in the folder of the project")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_paths_with_brackets_accents_and_invalid_utf8(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "a[b] {c} é"
    main(["fit", config(tmp_path), f"--output={folder}/run[1]"])
    main(["test", f"--ckpt_path={folder}/run[1]/checkpoints/last.ckpt"])
    assert (folder / "run[1]" / "test" / "config.yaml").is_file()
    main(["fit", config(tmp_path), f"--output={folder}/run[1]", "--ckpt_path=last"])

    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # pytest-xdist cannot send such a path
    latin = folder.rename(tmp_path / os.fsdecode(b"caf\xe9"))
    main(["test", f"--ckpt_path={latin}/run[1]/checkpoints/last.ckpt", f"--output={tmp_path}/test"])
    capsys.readouterr()
    assert "output: " in complaint(capsys, "fit", config(tmp_path), f"--output={latin}/new")
