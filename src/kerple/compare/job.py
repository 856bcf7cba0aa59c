"""Execution of a `Job` in a process of its own, which fits and then tests it.

The folder of the run is its state: a checkpoint is resumed, a fit that has ended is tested, what is finished is left
alone. The process holds the run's lock, so that it is waited for if it outlives the one that started it.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import kerple
from kerple.base.atomic import write
from kerple.base.directories import this_process
from kerple.base.errors import UserError
from kerple.base.sources import own_classes
from kerple.compare import records
from kerple.compare.comparison import Job
from kerple.measure import results

SOURCES = Path(kerple.__file__).parents[1]
CHECKOUT, INSTALLED = SOURCES.parent / "run.py", Path(kerple.__file__).with_name("__main__.py")
# the command of the process; Lightning starts the other ranks of a run by the command line that `work` sets
PROGRAM = "from kerple.cli.main import main; from kerple.compare.job import work; work(main)"
PATIENCE = 60.0  # seconds in which a run that is asked to stop has to save its checkpoint
hurry = threading.Event()  # a second signal has asked to stop


def start(job: Job, threads: int) -> "subprocess.Popen[bytes]":
    """Start the process of a run. What it prints is appended to the run's log.

    Args:
        job: The run.
        threads: Number of CPU threads, unless OMP_NUM_THREADS says another.
    """
    try:
        with locked(job, patient=False):
            pass
    except UserError as busy:
        print(f"{job.name} waits: {busy}", flush=True)
    log = job.beside(".log")
    paths = filter(None, [str(SOURCES), os.environ.get("PYTHONPATH")])
    environment = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    environment |= os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps(asdict(job), default=str)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            process_group=0,  # Ctrl-C is for the parent, which asks this process to save and end
        )


def wait(job: Job, process: "subprocess.Popen[bytes]") -> str | None:
    """Wait for the end of a run; the message if it is not finished then, with the end of what it printed."""
    status, log = process.wait(), job.beside(".log")
    if not status and records.finished(job):
        return None
    tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
    return f"{job.name}: ended with status {status}, see {log}:\n{tail}"


def stop(processes: "list[subprocess.Popen[bytes]]") -> None:
    """Have runs save what they can and end; one that takes longer than `PATIENCE`, or until `hurry`, is killed."""
    for process in processes:
        process.terminate()
    end = time.monotonic() + PATIENCE
    while any(process.poll() is None for process in processes):
        if hurry.wait(0.05) or time.monotonic() > end:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # its workers too
                process.wait()


def work(main: Callable[[list[str]], None]) -> None:
    """Finish the run that the argument of this process describes, whatever the state of the run's folder is.

    Args:
        main: Runs one command of ``run.py``.
    """
    content = json.loads(sys.argv[1])
    job = Job(**content | {key: Path(content[key]) for key in ("directory", "test_folder")})
    with locked(job):
        if not records.finished(job):  # else another comparison has done it meanwhile
            _finish(job, lambda *arguments: _call(main, arguments))


def _call(main: Callable[[list[str]], None], arguments: tuple[str, ...]) -> None:
    sys.argv = [str(CHECKOUT if CHECKOUT.is_file() else INSTALLED), *arguments]
    print("$", *sys.argv, flush=True)
    main([*arguments])


def _finish(job: Job, call: Callable[..., None]) -> None:
    resumed = job.checkpoint.is_file()
    # another test of this run is complete; otherwise a fit that has ended is called once more, and ends at once
    tested_before = resumed and any(records.described(path.parent) for path in job.directory.glob(f"*/{results.ABOUT}"))
    if job.fit and not tested_before:
        if not resumed:
            remove(job.directory)
            write(job.beside(records.INPUTS), json.dumps(job.inputs))
        # a path instead of "last", which would take the newest version of this folder, even one made by hand
        call("fit", *job.fit, *([f"--ckpt_path={job.checkpoint}"] if resumed else []))
    if (job.test_folder / results.ABOUT).exists() and records.described(job.test_folder) is None:  # made by hand
        job.test_folder.rename(f"{job.test_folder}-{time.strftime('%Y%m%d-%H%M%S')}")
    remove(job.test_folder)
    checkpoint = [f"--ckpt_path={job.checkpoint}"] if job.fit else []
    call("test", *checkpoint, *_trust(job.config), *job.test)
    records.complete(job)


def _trust(config: dict[str, Any]) -> list[str]:
    """The flag by which a test may import the user's own classes that the comparison names, as the fit did."""
    packages = sorted({name.split(".")[0] for name in own_classes(config)})
    return [f"--trust={','.join(packages)}"] if packages else []


def remove(folder: Path) -> None:
    """Remove a folder, if there is one."""
    if folder.exists():
        shutil.rmtree(folder)


def forget(job: Job) -> None:
    """Remove a run that was begun with another configuration than the comparison has now.

    Raises:
        UserError: If a process is at work in it.
    """
    with locked(job, patient=False):
        remove(job.directory)


@contextlib.contextmanager
def locked(job: Job, patient: bool = True) -> Iterator[None]:
    """Context in which no other process works on the run.

    Args:
        job: The run.
        patient: Whether to wait for a process that works on it; if not, there is an error.

    Raises:
        UserError: If another process works on the run and ``patient`` is false.
    """
    path = job.beside(".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if patient else fcntl.LOCK_NB))
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise UserError(f"{job.directory} is in use by {holder}; wait for its end or stop it") from error
        except OSError:  # the file system has no locks, so other processes cannot be kept out
            pass
        file.truncate(0)
        file.write(this_process())
        file.flush()
        yield
