"""Requeueing, against a scontrol that writes down what it is told."""

import os
import signal

import pytest
from pytorch_lightning import Callback, LightningModule, Trainer

from kerple.base.signals import Signals, requeue
from kerple.training.last_checkpoint import LastCheckpoint
from tests.toy import ToyData, small_model, trainer


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    program = tmp_path / "scontrol"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/told\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "told"


def test_requeue_names_the_job_or_the_task_of_an_array(scontrol, monkeypatch):
    requeue()
    assert not scontrol.exists()  # no SLURM, nothing to requeue
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    requeue()
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "12")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    requeue()
    assert scontrol.read_text().splitlines() == ["requeue 17", "requeue 12_3"]


def test_signals_are_noted_and_the_handlers_of_others_put_back():
    before = signal.getsignal(signal.SIGTERM)
    signals = Signals()
    signals.install()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert signals.received == signal.SIGUSR1
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.received == signal.SIGTERM  # to end wins over to come back
    signals.restore()
    assert signal.getsignal(signal.SIGTERM) is before


class AskedToStop(Callback):
    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_stopped_before_its_first_step_ends_after_it_and_does_not_look_finished(tmp_path):
    run = trainer(tmp_path, LastCheckpoint(), AskedToStop(), max_steps=2, num_sanity_val_steps=1)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end:
        run.fit(small_model(), ToyData())
    assert end.value.code == 143
    assert run.global_step == 1
    assert (tmp_path / "checkpoints" / "last.ckpt").is_file()
    assert signal.getsignal(signal.SIGTERM) == before
