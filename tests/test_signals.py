"""Requeueing, against a scontrol that writes down what it is told."""

import os
import signal
from pathlib import Path

import pytest

from kerple.signals import Signals, requeue


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "scontrol"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/told\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "told"


def test_requeue_names_the_job_or_the_task_of_an_array(scontrol: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requeue()
    assert not scontrol.exists()  # no SLURM, nothing to requeue
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    requeue()
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "12")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    requeue()
    assert scontrol.read_text().splitlines() == ["requeue 17", "requeue 12_3"]


def test_a_strange_job_number_is_refused(scontrol: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17; rm -r x")
    with pytest.raises(ValueError, match="SLURM_JOB_ID"):
        requeue()


def test_signals_are_noted_and_the_handlers_of_others_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    signals = Signals()
    signals.install()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert signals.received == signal.SIGUSR1
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.received == signal.SIGTERM  # to end wins over to come back
    signals.restore()
    assert signal.getsignal(signal.SIGTERM) is before
