"""Commands on toy data, called in this process."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Tokenizer, decoders, models

from kerple.cli.main import main
from kerple.config import PROGRAM
from kerple.positions import Shape, names, strategies
from kerple.positions.position_coupling import PlaceEmbedding
from kerple.tasks import TaskData
from kerple.training.continuation import decode_pieces
from kerple.training.next_commands import resume_command
from kerple.training.trained_model import load_trained
from tests.cli.tiny import complaint
from tests.toy import QUIET

TOY = yaml.safe_load("""
seed_everything: 3
experiment: toy
model: {position: KerpleLog, layers: 2, dim: 16, heads: 2, lr: 1.0}
data: {class_path: tests.toy.ToyData}
trainer:
  {max_steps: 12, accelerator: cpu, precision: bf16-mixed, gradient_clip_val: 1.0, val_check_interval: 6,
   check_val_every_n_epoch: null, enable_progress_bar: false, enable_model_summary: false, callbacks: [
     {class_path: ModelCheckpoint, init_args: {filename: best, monitor: val/loss, enable_version_counter: false}},
     {class_path: LastCheckpoint, init_args: {every_n_train_steps: 5}}, {class_path: KernelCurves}]}
""")
ADDITION = {"class_path": "kerple.tasks.Addition", "init_args": {"order": "reversed"}}
SIZES = {"train_length": 3, "length": 13, "batch_size": 4, "validation_examples": 8, "test_examples": 4}
PLACES = {"class_path": "TaskData", "init_args": {"task": ADDITION, **SIZES}}  # places of tokens
KINDS = ("Coupled", "LayerPattern")  # a strategy with places of a task, and one with a mapping of strategies


@pytest.fixture
def toy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("toy.yaml").write_text(yaml.safe_dump(TOY))
    return tmp_path


def fit(*flags: str) -> None:
    main(["fit", "--config", "toy.yaml", *flags])


def config_of(folder: Path) -> dict:
    return yaml.safe_load((folder / "config.yaml").read_text())


def test_fit_writes_checkpoints_events_and_configuration_to_its_folder(toy):
    fit()
    run = toy / "logs" / "toy" / "KerpleLog" / "seed-3"
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    assert list(run.glob("events.*"))
    assert config_of(run)["model"]["layers"] == 2
    last = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["global_step"] == 12  # the last step, although 12 is not a multiple of 5
    assert last["config"] == config_of(run)
    assert last["hyper_parameters"]["position"]["class_path"] == "kerple.positions.KerpleLog"

    fit("--trainer.max_steps", "1")
    assert config_of(run)["trainer"]["max_steps"] == 12
    assert config_of(run.with_name("seed-3_v1"))["trainer"]["max_steps"] == 1


@pytest.mark.slow
def test_ctrl_c_and_the_next_start_name_the_command_that_continues(toy, capsys):
    stop = ["--trainer.callbacks+=tests.disturbed.Interrupt", "--trainer.callbacks.hook=on_train_batch_end"]
    stop += ["--trainer.callbacks.call=3", f"--trainer.callbacks.number={int(signal.SIGINT)}"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(SystemExit) as end:
        fit(*stop, "--ckpt_path=last")
    signal.signal(signal.SIGINT, before)
    assert end.value.code == 130
    last = "logs/toy/KerpleLog/seed-3/checkpoints/last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 3
    command = shlex.split(capsys.readouterr().out.splitlines()[-1].partition(f"to continue this fit: {PROGRAM} ")[2])
    assert command == ["fit", "--config", "logs/toy/KerpleLog/seed-3/config.yaml", "--ckpt_path", last]

    fit("--trainer.max_steps=1")  # these options are not those of the stopped fit
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "stopped at step 3 of 12" in line]
    assert shlex.split(line.partition(f"to continue that one: {PROGRAM} ")[2]) == command
    shutil.copytree("logs/toy/KerpleLog/seed-3", "moved")
    main([*command, "--trainer.callbacks=[LastCheckpoint]"])
    assert torch.load(last, weights_only=True)["global_step"] == 12
    assert "other options" not in capsys.readouterr().out  # callbacks are not compared
    resumed = "logs/toy/KerpleLog/seed-3/config-resumed-1.yaml"  # the options of the last checkpoint
    assert shlex.split(resume_command(Path(last)))[-3:] == [resumed, "--ckpt_path", last]

    shutil.rmtree("logs")
    config = Path("moved/config.yaml")
    saver = {"class_path": "ModelCheckpoint", "init_args": {"dirpath": "logs/toy/KerpleLog/seed-3/best"}}
    in_csv = {"save_dir": "logs/toy/KerpleLog/seed-3/csv", "name": "", "version": ""}
    Path("moved/csv").mkdir()
    Path("moved/csv/metrics.csv").write_text("of the stopped fit")
    stored = yaml.safe_load(config.read_text())
    stored["trainer"] |= {"callbacks": [saver], "logger": {"class_path": "CSVLogger", "init_args": in_csv}}
    config.write_text(yaml.safe_dump(stored))
    main(["fit", "--config", "moved/config.yaml", "--ckpt_path", "last"])
    assert torch.load("moved/checkpoints/last.ckpt", weights_only=True)["global_step"] == 12
    assert list(Path("moved/best").glob("*.ckpt"))
    assert Path("moved/csv/metrics-1.csv").read_text() == "of the stopped fit"
    assert Path("moved/csv/metrics.csv").exists()
    assert not Path("logs").exists()


TRAINABLE = [name for name in names() if not strategies()[name](Shape(32, 2, 8)).test_only]
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in TRAINABLE if name not in KINDS]


@pytest.mark.parametrize("name", [*KINDS, *OTHERS])
def test_test_needs_only_the_checkpoint(name, toy, capsys):
    if issubclass(strategies()[name], PlaceEmbedding):
        Path("toy.yaml").write_text(yaml.safe_dump(TOY | {"data": PLACES}))
    fit("--trainer.max_steps", "1", "--model.position", name)
    run = toy / "logs" / "toy" / name / "seed-3"
    Path("toy.yaml").unlink()

    main(shlex.split(capsys.readouterr().out.splitlines()[-1].partition(f"to test it: {PROGRAM} ")[2]))
    assert "another strategy" not in capsys.readouterr().out

    tested, trained = config_of(run / "test")["model"], config_of(run)["model"]
    for option in ("parts", "kernels"):  # default classes are names in one, and names with options in the other
        if option in tested["position"].get("init_args", {}):
            classes = tested["position"]["init_args"].pop(option)
            assert [kind["class_path"] for kind in classes] == trained["position"]["init_args"].pop(option)
    if kinds := tested["position"].get("init_args", {}).pop("kinds", None):
        names_of_kinds = {kind: given["class_path"] for kind, given in kinds.items()}
        assert names_of_kinds == trained["position"]["init_args"].pop("kinds")
    assert tested == trained


@pytest.mark.slow
def test_flags_override_the_checkpoint_and_classes_of_others_need_trust(toy, capsys):
    fit("--trainer.max_steps", "1", "--model.position.floor", "0.02")
    run = toy / "logs/toy/KerpleLog/seed-3"
    test = ["test", "--ckpt_path", str(run / "checkpoints" / "last.ckpt"), "--trust", "tests"]

    assert "names the class tests.toy.ToyData" in complaint(capsys, *test[:-2])
    assert "ToyData, which cannot encode a prompt" in complaint(capsys, "export", *test[1:], "--output=out")
    main(test)
    main([*test, "--model.position.floor", "0.03", "--data.batch_size", "2"])

    assert config_of(run / "test")["model"]["position"]["init_args"]["floor"] == 0.02
    assert config_of(run / "test_v1")["model"]["position"]["init_args"]["floor"] == 0.03
    assert config_of(run / "test_v1")["data"]["init_args"]["batch_size"] == 2


def test_bolts_monitors_draw_histograms_of_the_data(toy):
    monitors = Path(__file__).parents[2] / "configs" / "analyses" / "data-monitors.yaml"
    Path("monitors.yaml").write_text(monitors.read_text().replace("log_every_n_steps: 50", "log_every_n_steps: 2"))
    fit("--config", "monitors.yaml", "--trainer.max_steps", "2")
    events = EventAccumulator(str(toy / "logs/toy/KerpleLog/seed-3"), size_guidance={"histograms": 0}).Reload()
    assert {"training_step/tokens/[4, 9]", "output/network.norm/[4, 8, 16]"} <= set(events.Tags()["histograms"])


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch multiplies with another library")
def test_mkl_uses_its_reproducible_mode_with_a_fixed_number_of_threads():
    program = "import torch\n{}\ntorch.ones(64, 64) @ torch.ones(64, 64)"
    settings = "from kerple.training.torch_settings import configure_torch\nconfigure_torch()"
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"} | {"MKL_VERBOSE": "1"}
    for before, mode in (("", "CNR:OFF Dyn:1"), (settings, "CNR:AUTO Dyn:0")):  # the first mode is MKL's default
        command = [sys.executable, "-c", program.format(before)]
        printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        assert re.search(f"SGEMM.* {mode} ", printed.splitlines()[-1])


@pytest.mark.slow
def test_auto_precision_is_stored_resolved_and_not_emulated_in_a_test(toy, monkeypatch, capsys):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)  # it can switch bf16 off
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    fit("--trainer.max_steps", "1", "--trainer.precision", "auto", "--trainer.callbacks+=Throughput")
    run = toy / "logs/toy/KerpleLog/seed-3"
    assert config_of(run)["trainer"]["precision"] == "bf16-mixed"
    assert json.loads((run / "cost.json").read_text())["environment"]["precision"] == "bf16-mixed"
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    main(["test", "--ckpt_path", str(run / "checkpoints" / "last.ckpt"), "--trust", "tests"])
    assert config_of(run / "test")["trainer"]["precision"] == "32-true"
    assert "emulates bf16-mixed, in which the run was trained" in capsys.readouterr().out

    fit("--trainer.max_steps", "1", "--trainer.precision", "auto", "--ckpt_path", "last")
    assert yaml.safe_load((run / "config-resumed-1.yaml").read_text())["trainer"]["precision"] == "bf16-mixed"


def test_a_module_of_the_current_folder_precedes_one_next_to_the_program(tmp_path, monkeypatch):
    here, program = tmp_path / "here", tmp_path / "program"
    for folder in (here, program):
        folder.mkdir()
        (folder / "sits_in_both.py").write_text(f"FOLDER = {str(folder)!r}")
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "argv", [str(program / "run.py"), "help"])
    monkeypatch.setattr(sys, "path", [str(program), *sys.path])
    main(["help"])
    found = import_module("sits_in_both").FOLDER
    assert found == str(here)


def test_a_strategy_of_the_current_folder_is_found_without_it_on_the_path(tmp_path, monkeypatch):
    (tmp_path / "my_own_strategy.py").write_text("from kerple.positions import ALiBi\n\n\nclass Mine(ALiBi): pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    main(["--help"])
    assert import_module("my_own_strategy").Mine.__name__ == "Mine"


TRAINER = QUIET | {"max_steps": 60, "gradient_clip_val": 1.0, "limit_val_batches": 0}
MODEL = {"position": "ALiBi", "layers": 2, "dim": 32, "heads": 2, "lr": 1e-2, "init": 0.15, "warmup": 0.1}


@pytest.mark.filterwarnings("ignore")
def test_predict_answers_and_stops_at_the_end_token(tmp_path, capsys):
    task = {"class_path": "kerple.tasks.Copy", "init_args": {"repeated": True, "symbols": 2}}
    settings = {"task": task, "train_length": 1, "test_lengths": [2], "length": 4, "held_out": 0.01, "batch_size": 8}
    config = {"model": MODEL, "trainer": TRAINER, "run_dir": str(tmp_path / "run")}  # earlier name of output
    config["data"] = {"class_path": "kerple.tasks.TaskData", "init_args": settings}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "--config", str(tmp_path / "run.yaml")])
    checkpoint = f"--ckpt_path={tmp_path}/run/checkpoints/last.ckpt"
    capsys.readouterr()
    for letter in "ab":
        main(["predict", checkpoint, "--prompt", f"{letter}="])
        assert capsys.readouterr().out == f"{letter}={letter}\n"

    model, data = load_trained(checkpoint.partition("=")[2])
    assert isinstance(data, TaskData)
    assert not model.training
    assert "the character 'ß'" in complaint(capsys, "predict", checkpoint, "--prompt", "ß=")
    with pytest.raises(SystemExit):
        main(["predict", checkpoint, "--prompt", "a=", "--temperature=-1"])
    printed = capsys.readouterr()
    assert "temperature: got -1" in printed.err
    assert not printed.out  # wrong options are reported before any output


def test_pieces_are_whole_characters_with_the_spaces_of_the_text():
    tokenizer = Tokenizer(models.WordLevel({"▁all": 0, "▁work": 1, "<0xC3>": 2, "<0xBC>": 3}, "▁all"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    data = SimpleNamespace(folder=SimpleNamespace(tokenizer=lambda: tokenizer))
    assert list(decode_pieces(data, [0], [1, 2, 3])) == [" work", "ü"]  # a text does not begin with a space
