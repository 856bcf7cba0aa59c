"""A run never writes to the folder of another run."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from subprocess import PIPE

import pytest

from kerple.base.errors import UserError
from kerple.base.run_folder import fit_directory, is_locked, unlock
from kerple.base.run_folder import test_directory as folder_of_a_test


@pytest.fixture(autouse=True)
def unlocked():
    yield
    unlock()


def with_checkpoint(run: Path) -> str:
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "last.ckpt").touch()
    return str(run / "checkpoints" / "last.ckpt")


def test_new_runs_get_new_versions_and_last_resumes_the_newest_with_a_checkpoint(tmp_path, monkeypatch):
    base = tmp_path / "new" / "lr[1]"  # brackets are not a pattern
    for expected in (base, Path(f"{base}_v1"), Path(f"{base}_v2")):
        assert fit_directory(base, None) == expected
        (expected / "config.yaml").touch()
        unlock()
    assert fit_directory(base, "last") == Path(f"{base}_v3")
    unlock()
    first, second = with_checkpoint(base), with_checkpoint(Path(f"{base}_v10"))
    for other in ("lr1_v20", "lr[1]_valid", "lr[1]_v1_v20"):  # folders of other runs
        with_checkpoint(base.with_name(other))
    Path(f"{base}_v11").mkdir()  # stopped before its first checkpoint
    for path, expected in (("last", Path(f"{base}_v10")), (second, Path(f"{base}_v10")), (first, base)):
        assert fit_directory(base, path) == expected
        unlock()
    assert fit_directory(base, str(tmp_path / "elsewhere.ckpt")) == Path(f"{base}_v3")
    monkeypatch.chdir(base)
    assert fit_directory(Path("."), None) == Path(f"{base}_v4")


def test_a_failed_start_removes_only_its_own_new_folder(tmp_path):
    for prepared, begun, left in (
        ([], ["config.yaml", "provenance"], []),
        ([], ["config.yaml", "attention.csv"], [".lock", "attention.csv", "config.yaml"]),  # with results
        ([".lock"], ["config.yaml"], [".lock", "config.yaml"]),  # a folder that existed before
        (["checkpoints", "notes.txt"], [], [".lock", "checkpoints", "notes.txt"]),  # a resumed run
    ):
        folder = tmp_path / f"run-{left}"
        for name in prepared:
            folder.mkdir(exist_ok=True)
            (folder / name).touch()
        resumed = str(folder / "checkpoints" / "x.ckpt") if "checkpoints" in prepared else None
        assert fit_directory(folder, resumed) == folder
        for name in begun:
            (folder / name).touch()
        unlock(remove_new=True)
        assert sorted(path.name for path in folder.glob("*")) == left
    (tmp_path / "file").touch()
    # reported before the run starts
    for impossible in (Path("/proc/nowhere/run"), Path("/proc/nowhere"), tmp_path / "file" / "run"):
        with pytest.raises(UserError, match=rf"output: {impossible} cannot be written to \(N"):
            fit_directory(impossible, None)


def test_a_test_writes_to_a_folder_inside_its_run(tmp_path):
    checkpoint = with_checkpoint(tmp_path / "run")
    assert folder_of_a_test(None, checkpoint, "test") == tmp_path / "run" / "test"
    (tmp_path / "run" / "test" / "config.yaml").touch()
    unlock()
    assert folder_of_a_test(None, checkpoint, "test") == tmp_path / "run" / "test_v1"
    assert folder_of_a_test(None, str(tmp_path / "loose.ckpt"), "validate") == tmp_path / "validate"
    assert folder_of_a_test(str(tmp_path / "there"), checkpoint, "test") == tmp_path / "there"


def test_nothing_is_written_through_a_link_in_a_foreign_folder(tmp_path):
    mine, run = tmp_path / "mine", tmp_path / "run"
    checkpoint = with_checkpoint(run)
    mine.mkdir()
    (mine / "text").write_text("mine")
    tested = partial(folder_of_a_test, None, checkpoint, "test")
    resumed = partial(fit_directory, run, checkpoint)
    for name, target, started in (
        (".lock", "text", resumed),
        ("checkpoints/best.ckpt", "text", resumed),
        ("csv", "", resumed),
        ("test", "", tested),
        ("test/.lock", "text", tested),
        (".lock", "missing", resumed),
    ):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).symlink_to(mine / target)
        with pytest.raises(UserError, match=rf"output: {run / name} is a link"):
            started()
        (run / name).unlink()
    (run / ".lock").symlink_to("checkpoints/last.ckpt")  # a link inside the folder
    with pytest.raises(UserError, match=rf"output: {run} cannot be written to \(Too many levels of symbolic links"):
        resumed()
    (run / ".lock").unlink()
    assert [path.name for path in mine.iterdir()] == ["text"]
    assert (mine / "text").read_text() == "mine"
    (run / "checkpoints" / "best.ckpt").symlink_to("last.ckpt")
    (tmp_path / "link").symlink_to(run)  # made by the user
    assert fit_directory(tmp_path / "link", str(tmp_path / "link" / "checkpoints" / "last.ckpt")) == tmp_path / "link"


FIT = """
import sys
from pathlib import Path
from kerple.base.run_folder import fit_directory
print(fit_directory(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None), flush=True)
sys.stdin.read()
"""


def start(*arguments: object) -> subprocess.Popen[str]:
    """Start a process that locks a folder, prints its path, and waits for the end of its input."""
    command = [sys.executable, "-c", FIT, *map(str, arguments)]
    return subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True)


def test_fits_started_at_once_each_get_a_folder(tmp_path):
    started = [start(tmp_path / "run") for _ in range(4)]
    found = [process.stdout.readline().strip() for process in started]  # type: ignore[union-attr]
    for process in started:
        process.communicate()
    assert sorted(found) == [str(tmp_path / name) for name in ("run", "run_v1", "run_v2", "run_v3")]


def test_a_running_fit_cannot_be_resumed(tmp_path):
    run = tmp_path / "run"
    checkpoint = with_checkpoint(run)
    first = start(run, checkpoint)
    assert first.stdout.readline().strip() == str(run)  # type: ignore[union-attr]
    for ckpt_path in (checkpoint, "last"):
        with pytest.raises(UserError, match=rf"output: .*run is in use by process {first.pid} on .* since 20\d\d-"):
            fit_directory(run, ckpt_path)
    assert is_locked(run)
    first.kill()
    first.communicate()
    assert not is_locked(run)
    assert not is_locked(tmp_path)
    assert fit_directory(run, checkpoint) == run


def test_a_child_process_does_not_keep_the_lock(tmp_path):
    checkpoint = with_checkpoint(tmp_path / "run")
    fit_directory(tmp_path / "run", checkpoint)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, b"!")
        time.sleep(60)
        os._exit(0)
    try:
        os.read(reading, 1)
        unlock()
        assert fit_directory(tmp_path / "run", checkpoint) == tmp_path / "run"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_only_the_first_process_of_a_run_makes_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "2")
    assert fit_directory(tmp_path / "run", None) == tmp_path / "run"
    assert not (tmp_path / "run").exists()
