"""Errors of memory, limits and file systems, as libraries raise them, are one line. Errors of this project are not."""

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from torch._utils import ExceptionWrapper

from kerple.base.atomic import write
from kerple.base.errors import UserError, machine_error


def open_many() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 1, hard))
    try:
        _ = [open(os.devnull) for _ in range(soft)]  # noqa: SIM115
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def fail_in_worker() -> None:
    try:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    except OSError:
        ExceptionWrapper(where="in DataLoader worker process 0").reraise()


def fail(number: int) -> Any:
    raise OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("cause", "line"),
    [
        (lambda: torch.empty(2**58, dtype=torch.int8), "memory: Cannot allocate memory; decrease data.batch_size"),
        (lambda: np.empty(2**58, np.int8), "memory: Cannot allocate memory; decrease data.batch_size"),
        (
            lambda: Tokenizer(models.BPE()).save("x" * 300),
            "file system: File name too long; check",
        ),
        (open_many, "/dev/null: Too many open files; raise the limit"),
        (fail_in_worker, "file system: Too many open files; raise the limit (ulimit -n), or use fewer workers"),
        (lambda: fail(errno.EIO), "file system: Input/output error; check"),
        (lambda: fail(errno.ESTALE), "file system: Stale file handle; check"),
        (lambda: fail(errno.ENOLCK), "file system: No locks available; check"),
        (lambda: open("/nowhere/file"), None),  # noqa: SIM115
        (lambda: {}["a (28)"], None),
        (lambda: torch.zeros(3) + torch.zeros(4), None),
    ],
)
def test_errors_of_the_machine_are_one_line(cause: Callable[[], Any], line: str | None) -> None:
    with pytest.raises(Exception) as error:  # noqa: PT011
        cause()
    message = machine_error(error.value)
    assert message is None if line is None else line in str(message)


def test_a_users_mistake_is_not_an_error_of_the_machine() -> None:
    assert machine_error(UserError("x: cannot be read ([Errno 5] Input/output error)")) is None


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_failing_disk_keeps_the_previous_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a", "before")
    monkeypatch.setattr(os, name, lambda *_: fail(errno.EIO))
    with pytest.raises(OSError, match="Input/output error") as error:
        write(tmp_path / "a", "after")
    assert str(machine_error(error.value)).startswith(f"{tmp_path}/a: Input/output error; check")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "before"


def test_a_file_system_that_cannot_sync_folders_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda file: fail(errno.EINVAL) if os.path.isdir(f"/proc/self/fd/{file}") else sync(file)
    )
    write(tmp_path / "a", "after")
    assert (tmp_path / "a").read_text() == "after"
