"""A file is the new one or the one before, whatever happens in between."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from kerple.base.atomic import write, writing

FORK = multiprocessing.get_context("fork")


def test_a_file_is_made_with_its_folder_and_replaced(tmp_path):
    path = tmp_path / "deep" / "a[1].json"
    for content, read in (("über", "über".encode()), (b"\x00\xff", b"\x00\xff")):
        write(path, content)
        assert path.read_bytes() == read
    assert list(path.parent.iterdir()) == [path]
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask  # as a file that is simply opened


def test_an_error_while_it_is_written_leaves_the_previous_one(tmp_path):
    path = tmp_path / "a"
    write(path, "before")

    def fail() -> None:
        with writing(path) as file:
            file.write(b"after")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def _die(path: Path) -> None:
    with writing(path) as file:
        file.write(b"after")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_kill_leaves_goes_with_the_next_file(tmp_path):
    path = tmp_path / "a"
    write(path, "before")
    process = FORK.Process(target=_die, args=(path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert path.read_text() == "before"
    (left_over,) = set(tmp_path.iterdir()) - {path}
    os.utime(left_over, (0, 0))
    write(path, "after")
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


def test_writers_of_the_same_file_do_not_disturb_each_other(tmp_path):
    path = tmp_path / "a"
    with writing(path) as first:
        first.write(b"first")
        with writing(path) as second:
            second.write(b"second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]
