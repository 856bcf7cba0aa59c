"""A file or checkpoint is always the previous one or the new one, after kills, full disks and concurrent writers."""

import errno
import multiprocessing
import os
import pickle
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from kerple.base.atomic import write, writing
from kerple.training.checkpoint_io import AtomicCheckpointIO
from tests.toy import Line, ToyData, trainer

FORK = multiprocessing.get_context("fork")


def test_a_file_is_written_with_its_folder_and_replaced(tmp_path):
    path = tmp_path / "deep" / "a[1].json"
    for content, read in (("über", "über".encode()), (b"\x00\xff", b"\x00\xff")):
        write(path, content)
        assert path.read_bytes() == read
    assert list(path.parent.iterdir()) == [path]
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask  # like a file that is opened for writing


def exit_code(target: Callable[[Path], None], path: Path) -> int | None:
    process = FORK.Process(target=target, args=(path,))
    process.start()
    process.join()
    return process.exitcode


def die(path: Path) -> None:
    with writing(path) as file:
        file.write(b"after")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def test_temporary_files_of_killed_processes_are_removed(tmp_path):
    path = tmp_path / "a"
    write(path, "before")
    assert exit_code(die, path) == -signal.SIGKILL
    assert path.read_text() == "before"
    (left_over,) = set(tmp_path.iterdir()) - {path}
    os.utime(left_over, (0, 0))
    write(path, "after")
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


def test_concurrent_writers_of_one_file_do_not_interfere(tmp_path):
    path = tmp_path / "a"
    with writing(path) as first:
        first.write(b"first")
        with writing(path) as second:
            second.write(b"second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def state(number: float) -> dict[str, Any]:
    # small, so that torch uses no threads, which do not survive a fork
    return {"weights": torch.full((30_000,), number)}


def fill_the_disk(path: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # the kernel refuses longer files
    with pytest.raises(OSError, match=r"File too large: '.*/last.ckpt'"):
        AtomicCheckpointIO().save_checkpoint(state(2), path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    os._exit(7)


def test_a_full_disk_keeps_the_previous_checkpoint(tmp_path):
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(state(1), path)
    assert exit_code(fill_the_disk, path) == 7
    assert torch.load(path, weights_only=True)["weights"][0] == 1
    assert list(tmp_path.iterdir()) == [path]


class Falling(Line):
    """Model whose validation loss falls, so that each validation has a new best checkpoint."""

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        self.log("loss", -float(self.global_step))


def test_the_recorded_best_checkpoint_exists_after_a_full_disk(tmp_path, monkeypatch):
    keep = ModelCheckpoint(tmp_path, "{step}", monitor="loss", save_top_k=1)
    often = {"max_steps": 8, "val_check_interval": 2, "num_sanity_val_steps": 0}
    run = trainer(tmp_path, keep, plugins=[AtomicCheckpointIO()], **often)
    save, calls = torch.save, []

    def fail_at_the_third(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(*arguments)

    monkeypatch.setattr(torch, "save", fail_at_the_third)
    with pytest.raises(OSError, match="No space left on device"):
        run.fit(Falling(), ToyData())
    kept = list(tmp_path.glob("*.ckpt"))
    assert [path.name for path in kept] == ["step=4.ckpt"]
    stored = torch.load(kept[0], weights_only=True)["callbacks"]
    (state_of_best,) = (value for key, value in stored.items() if key.startswith("ModelCheckpoint"))
    assert Path(state_of_best["best_model_path"]) == kept[0]  # a resumed run reads this path


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("exploded",)


def test_loading_runs_no_code_with_weights_only_false(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": Bomb()}, tmp_path / "bomb.ckpt")
    with pytest.raises(pickle.UnpicklingError):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "bomb.ckpt", weights_only=False)
    assert not Path("exploded").exists()
