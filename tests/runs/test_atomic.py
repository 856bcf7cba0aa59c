"""A checkpoint on the disk is the new one or the one before, whatever happens in between."""

import errno
import multiprocessing
import os
import pickle
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import kerple.runs.atomic
from kerple.runs.atomic import AtomicCheckpointIO

FORK = multiprocessing.get_context("fork")


def value(path: Path) -> float:
    return torch.load(path, weights_only=True)["weights"][0].item()


def state(number: float) -> dict[str, Any]:
    return {"weights": torch.full((50_000,), number)}


def test_writes_beside_the_target_and_leaves_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "last.ckpt"
    steps = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: steps.append("fsync") or fsync(file))
    monkeypatch.setattr(
        os, "replace", lambda source, to: steps.append(f"rename in {Path(source).parent.name}") or replace(source, to)
    )
    AtomicCheckpointIO().save_checkpoint(state(1), path)
    assert steps == ["fsync", "rename in deep", "fsync"]  # the file, its name, the folder
    assert [p.name for p in path.parent.iterdir()] == ["last.ckpt"]
    assert AtomicCheckpointIO().load_checkpoint(path)["weights"][0] == 1


def _die_while_writing(path: Path) -> None:
    replace = os.replace

    def kill(source: str, target: Path) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace = kill
    AtomicCheckpointIO().save_checkpoint(state(2), path)


def test_a_kill_before_the_rename_leaves_the_previous_one(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(state(1), path)
    process = FORK.Process(target=_die_while_writing, args=(path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert value(path) == 1
    assert len(list(tmp_path.iterdir())) == 2  # and what the killed one left, until the next is written
    AtomicCheckpointIO().save_checkpoint(state(3), path)
    assert value(path) == 3
    assert list(tmp_path.iterdir()) == [path]


def _fill_the_disk(path: Path, other: Path, reports: Any) -> None:
    plugin = AtomicCheckpointIO()
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # the kernel refuses what goes beyond
    with pytest.warns(UserWarning, match=r"No room for the checkpoint .*last.ckpt .*the previous one is intact"):
        plugin.save_checkpoint(state(2), path)
    failed = plugin.failure.errno if plugin.failure else None
    plugin.remove_checkpoint(other)
    kept = other.exists()
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    plugin.save_checkpoint(state(3), path)
    reports.put((failed, kept, plugin.failure))


def test_a_full_disk_leaves_the_previous_one_and_says_so(tmp_path: Path) -> None:
    path, other = tmp_path / "last.ckpt", tmp_path / "best.ckpt"
    for target in (path, other):
        AtomicCheckpointIO().save_checkpoint(state(1), target)
    reports = FORK.Queue()
    process = FORK.Process(target=_fill_the_disk, args=(path, other, reports))
    process.start()
    failed, kept, cleared = reports.get(timeout=60)
    process.join()
    assert failed == errno.EFBIG
    assert kept, "an older checkpoint may be removed only after the newer one is on the disk"
    assert cleared is None
    assert value(path) == 3
    assert {p.name for p in tmp_path.iterdir()} == {"last.ckpt", "best.ckpt"}


def test_other_errors_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(kerple.runs.atomic, "_write", refuse)
    with pytest.raises(OSError, match="broken disk"):
        AtomicCheckpointIO().save_checkpoint(state(1), tmp_path / "last.ckpt")


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("exploded",)


def test_loading_runs_nothing_even_when_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": Bomb()}, tmp_path / "bomb.ckpt")
    with pytest.raises(pickle.UnpicklingError):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "bomb.ckpt", weights_only=False)
    assert not Path("exploded").exists()
