"""Callbacks of training: the last checkpoint, provenance, random state and signals. See also `tests/test_resume.py`."""

import json
import math
import os
import random
import shutil
import signal
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer, seed_everything
from pytorch_lightning.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor

from kerple.base import processor_cores
from kerple.base.errors import UserError
from kerple.base.run_folder import LAST
from kerple.data.remote_shards import UnreachableShards
from kerple.training import last_checkpoint, provenance, random_state
from kerple.training.last_checkpoint import LastCheckpoint
from kerple.training.non_finite_guard import NonFiniteGuard
from kerple.training.provenance import Provenance
from kerple.training.random_state import RandomState
from kerple.training.signals import Signals, requeue
from kerple.training.trainer import AutoTrainer
from tests.disturbed import Interrupt
from tests.toy import Line, ToyData, fit, small_model, trainer


class Recorded(LastCheckpoint):
    def save(self, trainer: Trainer) -> None:
        super().save(trainer)
        self.steps = [*getattr(self, "steps", []), trainer.global_step]
        self.handlers = {signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"every_minutes": 2.5}, [4, 7, 10]),  # hooks of callbacks run first: a step's minute counts in the next step
        ({"every_minutes": None, "every_n_train_steps": 4}, [4, 8, 10]),
        ({"every_minutes": 4, "every_n_train_steps": 3}, [3, 6, 9, 10]),
        ({}, [10]),
    ],
)
def test_the_last_checkpoint_follows_minutes_and_steps(options, steps, tmp_path: Path, monkeypatch) -> None:
    minutes = [1000.0]  # a step takes a minute
    monkeypatch.setattr(last_checkpoint, "time", SimpleNamespace(monotonic=lambda: 60 * minutes[0]))

    class Slow(Line):
        def on_train_batch_end(self, *_: object) -> None:
            minutes[0] += 1

    callback = Recorded(**options)
    trainer(tmp_path, callback, max_steps=10, limit_val_batches=0).fit(Slow(), ToyData())
    assert callback.steps == steps
    assert callback.handlers == {callback._signals._record}  # signals during the last save do not end the process
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 10


def test_a_stop_by_another_callback_takes_effect_after_the_step(tmp_path: Path) -> None:
    class Stop(Callback):
        def on_train_batch_end(self, trainer: Trainer, model: object, outputs: object, batch: object, i: int) -> None:
            trainer.should_stop = i == 4  # the first of the two micro-batches of step 3

    fit(tmp_path, model := Line(), Stop())
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 3
    assert len(model.seen) == 6


def test_a_fit_does_not_continue_from_a_validation_inside_a_step(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 3, "accumulate_grad_batches": 2, "val_check_interval": 3}
    each = ModelCheckpoint(tmp_path, save_top_k=-1)
    trainer(tmp_path, LastCheckpoint(), each, **options).fit(small_model(), ToyData())
    inside, between = tmp_path / "epoch=0-step=1.ckpt", tmp_path / "epoch=0-step=3.ckpt"  # after 3 and 6 micro-batches
    refused = pytest.raises(UserError, match="inside an optimiser step")
    for path, expected in ((inside, refused), (between, nullcontext())):
        run = trainer(tmp_path, LastCheckpoint(), **options)
        with expected:
            run.fit(small_model(), ToyData(), ckpt_path=path, weights_only=False)


def test_a_fit_with_averaged_weights_does_not_continue_without_averaging(tmp_path: Path) -> None:
    run = trainer(tmp_path, LastCheckpoint(), EMAWeightAveraging(decay=0.5), max_steps=2)
    run.fit(small_model(), ToyData())
    continued = trainer(tmp_path, LastCheckpoint(), max_steps=3)
    with pytest.raises(UserError, match=r"trainer\.callbacks: got no WeightAveraging, expected one"):
        continued.fit(small_model(), ToyData(), ckpt_path=tmp_path / LAST, weights_only=False)


def test_a_fit_with_averaged_weights_continues_after_an_early_end(tmp_path: Path) -> None:
    weights = []
    for parts in (1, 2):
        torch.manual_seed(0)
        for part in range(parts):
            options = {"max_steps": 6, "max_epochs": 1 if part < parts - 1 else None, "limit_train_batches": 3}
            run = trainer(tmp_path / str(parts), LastCheckpoint(), EMAWeightAveraging(decay=0.5), **options)
            model, last = small_model(), tmp_path / str(parts) / LAST
            run.fit(model, ToyData(), ckpt_path=last if part else None, weights_only=False)
        weights.append((model.state_dict(), torch.load(last, weights_only=False)["current_model_state"]))
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    averages, trained = weights[0]
    assert not all(torch.equal(trained[name], averages[name]) for name in averages)


def test_an_average_that_has_not_begun_is_the_weights(tmp_path: Path) -> None:
    validated, current, weights = [], [], []

    class Record(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
            current[:] = [{name: weight.clone() for name, weight in pl_module.state_dict().items()}]

        def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
            equal = [torch.equal(weight, current[0][name]) for name, weight in pl_module.state_dict().items()]
            validated.append((trainer.global_step, all(equal)))

    for start, step in ((4, 6), (9, 6), (None, 6)):
        torch.manual_seed(0)
        averaging = [] if start is None else [EMAWeightAveraging(decay=0.5, update_starting_at_step=start)]
        options = {"val_check_interval": 2, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0}
        options |= {"limit_val_batches": 1, "max_steps": step}
        third = ModelCheckpoint(tmp_path / str(start), "{step}", save_top_k=-1, every_n_train_steps=3)
        run = trainer(tmp_path / str(start), Record(), LastCheckpoint(2), third, *averaging, **options)
        run.fit(model := small_model(), ToyData())
        saved = torch.load(tmp_path / str(start) / LAST, weights_only=False)["state_dict"]
        torch.testing.assert_close(saved, dict(model.state_dict()), rtol=0, atol=0)
        between = torch.load(tmp_path / str(start) / "step=3.ckpt", weights_only=False)["state_dict"]
        weights.append((saved, between))
    assert validated == [(2, True), (4, True), (6, False)] + 2 * [(2, True), (4, True), (6, True)]
    torch.testing.assert_close(weights[1], weights[2], rtol=0, atol=0)


def test_a_mean_over_epochs_is_used_if_the_fit_ends_before_its_last_epoch(tmp_path: Path) -> None:
    averaging = StochasticWeightAveraging(0.005, swa_epoch_start=1)
    options = {"max_epochs": 4, "max_steps": 8, "limit_train_batches": 3}
    trainer(tmp_path, LastCheckpoint(), averaging, **options).fit(small_model(), ToyData())
    content = torch.load(tmp_path / LAST, weights_only=False)
    (state,) = (state for name, state in content["callbacks"].items() if "StochasticWeightAveraging" in name)
    assert state["n_averaged"] == 3
    torch.testing.assert_close(content["state_dict"], state["average_model_state"], rtol=0, atol=0)


def test_a_fit_with_a_mean_over_epochs_continues_with_the_trained_weights_after_an_early_end(tmp_path: Path) -> None:
    class Stop(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            trainer.should_stop = trainer.current_epoch == 2

    contents = []
    for stops in ([[]], [[Stop()], []]):
        last = tmp_path / str(len(stops)) / LAST
        for number, stop in enumerate(stops):
            callbacks = [LastCheckpoint(), StochasticWeightAveraging(0.005, 1), *stop]
            run = trainer(tmp_path / str(len(stops)), *callbacks, max_epochs=5, max_steps=15, limit_train_batches=3)
            run.fit(small_model(), ToyData(), ckpt_path=last if number else None, weights_only=False)
        contents.append(torch.load(last, weights_only=False)["state_dict"])
    torch.testing.assert_close(*contents, rtol=0, atol=0)


def test_a_second_callback_that_writes_the_last_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^trainer\.callbacks: ModelCheckpoint: save_last: got True, expected null"):
        trainer(tmp_path, LastCheckpoint(), ModelCheckpoint(save_last=True), max_steps=1).fit(small_model(), ToyData())
    other = ModelCheckpoint(tmp_path / "other", save_last=True)
    trainer(tmp_path, LastCheckpoint(), other, max_steps=1).fit(small_model(), ToyData())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"callbacks": StochasticWeightAveraging(0.005, 1)}, r"^trainer\.max_epochs: got None, expected the number"),
        (
            {"callbacks": EMAWeightAveraging(), "precision": "bf16-true"},
            r"^trainer\.precision: got bf16-true, expected",
        ),
    ],
)
def test_averages_that_would_be_wrong_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        AutoTrainer(max_steps=3, **options)


def test_a_checkpoint_of_a_stopped_validation_has_the_weights_of_the_training(tmp_path: Path) -> None:
    model, seen = small_model(), []

    class Unreachable(Callback):
        def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            seen.append({name: weight.clone() for name, weight in pl_module.state_dict().items()})

        def on_validation_batch_start(self, trainer: Trainer, *_: object) -> None:
            raise UnreachableShards("gone")

    options = {"max_steps": 6, "val_check_interval": 3, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0}
    run = trainer(tmp_path, Unreachable(), LastCheckpoint(), EMAWeightAveraging(decay=0.5), **options)
    with pytest.raises(UnreachableShards):
        run.fit(model, ToyData())
    torch.testing.assert_close(torch.load(tmp_path / LAST, weights_only=False)["current_model_state"], seen[0])


def test_a_fit_whose_data_is_unreachable_before_its_first_step_keeps_its_checkpoint(tmp_path: Path) -> None:
    class Unreachable(ToyData):
        def train_dataloader(self) -> Any:
            raise UnreachableShards("gone")

    trainer(tmp_path, LastCheckpoint(), max_steps=2).fit(small_model(), ToyData())
    before = (tmp_path / LAST).read_bytes()
    run = trainer(tmp_path, LastCheckpoint(), max_steps=4)
    with pytest.raises(UnreachableShards):
        run.fit(small_model(), Unreachable(), ckpt_path=tmp_path / LAST, weights_only=False)
    assert (tmp_path / LAST).read_bytes() == before


def test_a_checkpoint_before_an_unreachable_batch_counts_as_one_after_a_step(tmp_path: Path) -> None:
    class Ends(ToyData):
        error: type[BaseException] = UnreachableShards

        def train_dataloader(self) -> Any:
            yield from list(super().train_dataloader())[:3]
            raise self.error("gone")

    loops = []
    for error, steps in ((UnreachableShards, 9), (OSError, 2)):  # the batch is read before the step of the previous one
        data, folder = Ends(), tmp_path / error.__name__
        data.error = error
        with pytest.raises(error):
            trainer(folder, LastCheckpoint(steps), max_steps=9, limit_val_batches=0).fit(small_model(), data)
        loops.append(torch.load(folder / LAST, weights_only=False)["loops"]["fit_loop"])
    for name in ("epoch_loop.state_dict", "epoch_loop.batch_progress"):
        assert loops[0][name] == loops[1][name]


def test_averages_of_an_fp64_fit_are_fp64(tmp_path: Path) -> None:
    run = trainer(tmp_path, LastCheckpoint(), EMAWeightAveraging(decay=0.5), max_steps=2, precision="64-true")
    run.fit(small_model(), ToyData())
    content = torch.load(tmp_path / LAST, weights_only=False)
    for key in ("state_dict", "current_model_state"):
        assert {weight.dtype for weight in content[key].values() if weight.is_floating_point()} == {torch.float64}


def test_a_second_fit_forgets_the_micro_batches_of_a_stopped_step(tmp_path: Path) -> None:
    losses = []
    for stale in ([], [torch.tensor([1e6, 1.0], dtype=torch.float64)]):
        torch.manual_seed(0)
        model, guard = small_model(), NonFiniteGuard()
        model._sums, guard._losses = stale, [torch.tensor(math.nan)] * len(stale)
        run = trainer(tmp_path / str(len(stale)), guard, max_steps=1)
        run.fit(model, ToyData())
        losses.append(float(run.callback_metrics["train/loss"]))
    assert losses[0] == losses[1]


def test_provenance_of_each_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, new = tmp_path / "provenance", ["src/new.py", "b.py"]
    for number, diff, added in (("0", "", []), ("1", "+ changed\n", new), ("2", "", new)):
        output = {"rev-parse": "f00d\n", "diff": diff, "ls-files": "".join(f"{name}\n" for name in added)}
        monkeypatch.setattr(provenance, "git", lambda *arguments, output=output: output[arguments[0]])
        fit(tmp_path, Line(), Provenance())
        run = json.loads((folder / number / "run.json").read_text())
        assert (run["revision"], run["changed"], run["added"]) == ("f00d", bool(diff or added), added)
        patch = folder / number / "changes.patch"
        assert (patch.read_text() if patch.exists() else "") == diff
        if number == "1":
            shutil.rmtree(folder / "0")  # a user deletes the folder, and the next number still grows
    assert sorted(p.name for p in folder.iterdir()) == ["1", "2"]
    assert run["command"][1:]
    assert run.keys() >= {"started", "devices", "resumed_from"}
    assert f"torch=={version('torch')}" in (folder / "1" / "lock.txt").read_text().splitlines()


class Draws(Callback):
    """Draws random numbers between the batches, as a validation may."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        torch.rand(trainer.global_step)
        random.random()
        np.random.rand()  # noqa: NPY002


class Noise(Line):
    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        self.seen += torch.rand(()).item(), random.random(), np.random.rand()  # noqa: NPY002
        return self.weight**2


def test_draws_between_batches_do_not_change_training(tmp_path: Path) -> None:
    undisturbed, disturbed = Noise(), Noise()
    for model, others in ((undisturbed, []), (disturbed, [Draws()])):
        seed_everything(5, verbose=False)
        fit(tmp_path / str(len(others)), model, RandomState(), *others)
    assert undisturbed.seen == disturbed.seen
    assert len(set(undisturbed.seen)) == 3 * 12


def test_requeue_names_the_job_or_the_task_of_an_array(tmp_path, monkeypatch):
    program, calls = tmp_path / "scontrol", tmp_path / "calls"
    program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    requeue()
    assert not calls.exists()  # without SLURM there is no job
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    requeue()
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "12")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    requeue()
    assert calls.read_text().splitlines() == ["requeue 17", "requeue 12_3"]


def test_signals_are_recorded_and_earlier_handlers_restored(capfd):
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as with nohup
    interrupt, signals = signal.signal(signal.SIGINT, signal.default_int_handler), Signals()
    signals.install()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    os.kill(os.getpid(), signal.SIGUSR1)
    assert signals.received == signal.SIGUSR1
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.received == signal.SIGTERM  # SIGTERM takes precedence over SIGUSR1
    os.kill(os.getpid(), signal.SIGINT)
    assert "Ctrl-C" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL  # a second Ctrl-C ends the process
    signals.restore()
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_a_signal_before_the_first_step_takes_effect_after_this_step(tmp_path):
    stop = Interrupt("on_sanity_check_end", 1, signal.SIGTERM)
    run = trainer(tmp_path, LastCheckpoint(), stop, max_steps=2, num_sanity_val_steps=1)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end:
        run.fit(small_model(), ToyData())
    assert end.value.code == 143
    assert run.global_step == 1
    assert (tmp_path / "checkpoints" / "last.ckpt").is_file()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("environment", "cores", "device", "threads", "line"),
    [
        ({}, 4, "cpu", 4, "threads: 4, because the run was started with this number"),
        ({"OMP_NUM_THREADS": "2", processor_cores.CHOSEN: "1"}, 8, "cpu", 4, "threads: 4, because"),  # set by `compare`
        ({"OMP_NUM_THREADS": "2"}, 8, "cpu", 2, "threads: 4 -> 2, so the run will not be bit for bit"),
        ({}, 3, "cpu", 2, "threads: 4 -> 2"),
        ({}, 8, "cuda", 2, ""),
    ],
)
def test_a_resumed_run_keeps_its_number_of_threads(environment, cores, device, threads, line, monkeypatch, capsys):
    for name in ("OMP_NUM_THREADS", processor_cores.CHOSEN):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    used, checkpoint = [4], {}
    monkeypatch.setattr(torch, "get_num_threads", lambda: used[-1])
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    monkeypatch.setattr(random_state, "cores", lambda: cores)
    trainer = SimpleNamespace(world_size=1, strategy=SimpleNamespace(root_device=torch.device(device)))
    RandomState().on_save_checkpoint(trainer, None, checkpoint)
    used.append(2)
    for damage in ({}, {"threads": None}, {"threads": "4"}, {"threads": 2}):  # the first one as in earlier versions
        RandomState().on_load_checkpoint(trainer, None, damage)
    assert capsys.readouterr().out == ""
    RandomState().on_load_checkpoint(trainer, None, checkpoint)
    assert used[-1] == threads
    assert capsys.readouterr().out.startswith(line)
