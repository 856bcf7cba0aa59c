"""The process of one run of a comparison, which calls `fit` and then `test`.

The content of a run's folder determines the next step: a fit with a checkpoint is resumed, a finished fit is tested,
and a finished run is not changed. The process holds the run's lock. If the process outlives the command that started
it, the next command waits until the process ends.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

import kerple
from kerple.base.atomic import no_follow, write
from kerple.base.errors import UserError
from kerple.base.processor_cores import CHOSEN
from kerple.base.run_folder import lock
from kerple.compare import committed_records
from kerple.compare.planned_run import PlannedRun
from kerple.config.files import read_mapping
from kerple.config.user_code_digests import own_classes, source_digests
from kerple.measure import results_table

SOURCES = Path(kerple.__file__).parents[1]
# program of the commands `fit` and `test`: run.py in a checkout, __main__.py in an installed package
CHECKOUT, INSTALLED = SOURCES.parent / "run.py", Path(kerple.__file__).with_name("__main__.py")
STOP_TIMEOUT = 60.0  # seconds in which a terminated run can save its checkpoint
signals: list[int] = []  # signals that the comparison has received; after the second one, `stop` kills the runs


def start(job: PlannedRun, threads: int, program: list[str]) -> "subprocess.Popen[bytes]":
    """Start the process of a run. The output of the process is appended to the run's log.

    If another process holds the run's lock, the new process waits for it, and a message says so.

    Args:
        job: The run.
        threads: Number of CPU threads. The environment variable OMP_NUM_THREADS replaces it.
        program: Arguments of Python for a program that calls `work`.
    """
    try:
        with locked(job, patient=False):
            pass
    except UserError as busy:
        print(f"{job.name} waits: {busy}", flush=True)
    log, task = job.sidecar(".log"), job.sidecar(f".{job.test_folder.name}.task.json")
    write(task, json.dumps(asdict(job), default=str))
    paths = filter(None, [str(SOURCES), os.environ.get("PYTHONPATH")])
    environment = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    if "OMP_NUM_THREADS" not in os.environ:
        environment[CHOSEN] = "1"
    environment |= os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    with open(log, "ab", opener=no_follow) as output:
        return subprocess.Popen(
            [sys.executable, *program, str(task)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            process_group=0,  # Ctrl-C reaches only the parent, which then terminates this process
        )


def wait(job: PlannedRun, process: "subprocess.Popen[bytes]") -> str | None:
    """Wait for the end of a run's process.

    Returns:
        None if the run is finished, otherwise an error message with the last lines of its output.
    """
    status, log = process.wait(), job.sidecar(".log")
    if not status and committed_records.finished(job):
        return None
    tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
    return f"{job.name}: ended with status {status}, see {log}:\n{tail}"


def stop(processes: "list[subprocess.Popen[bytes]]") -> None:
    """Terminate processes of runs and wait for their end. Runs save a checkpoint when they are terminated.

    The processes are killed after `STOP_TIMEOUT` seconds, or after a second signal.
    """
    for process in processes:
        process.terminate()
    end = time.monotonic() + STOP_TIMEOUT
    while any(process.poll() is None for process in processes):
        time.sleep(0.05)
        if len(signals) > 1 or time.monotonic() > end:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with its data workers
                process.wait()


def work(main: Callable[[list[str]], None]) -> None:
    """Finish the run whose `PlannedRun` is in the JSON file ``sys.argv[1]``, from any state of the run's folder.

    Args:
        main: Function that runs one command of ``run.py``, such as `fit`, with a list of arguments.
    """
    content = read_mapping(Path(sys.argv[1]))
    job = PlannedRun(**content | {key: Path(content[key]) for key in ("directory", "test_folder")})
    with locked(job):
        # another comparison may have finished the run while this process waited for the lock
        if not committed_records.finished(job):
            if changes := committed_records.changes(job):
                sys.exit(f"another command has made this run with another configuration: {'; '.join(changes)}")
            for name, digest in source_digests(job.training).items():
                if job.inputs.get(name, digest) != digest:
                    sys.exit(f"{name} has changed since the comparison was started; run the command again")
            _finish(job, main)


def _call(main: Callable[[list[str]], None], *arguments: str) -> None:
    """Print and run one command of ``run.py``."""
    # Lightning starts the other ranks of a run with the command line in sys.argv
    sys.argv = [str(CHECKOUT if CHECKOUT.is_file() else INSTALLED), *arguments]
    print("$", *sys.argv, flush=True)
    main([*arguments])


def _finish(job: PlannedRun, main: Callable[[list[str]], None]) -> None:
    """Fit and test a run, and add the entry ``run`` to its results. The fit is skipped if a test of it is complete."""
    resumed = job.checkpoint.is_file()
    # without a complete test, even a finished fit is resumed; it then ends immediately
    tests = job.directory.glob(f"*/{results_table.ABOUT}")
    tested_before = resumed and any(committed_records.read_run_entry(path.parent) for path in tests)
    if job.config and not tested_before:
        if not resumed:
            remove(job.directory)
        committed_records.begin(job, resumed)
        # not --ckpt_path=last, which prefers the newest numbered sibling folder, such as seed-1_v1 of a user's own fit
        checkpoint = [f"--ckpt_path={job.checkpoint}"] if resumed else []
        _call(main, "fit", _file(job, ".fit.yaml", job.config), f"--output={job.directory}", *checkpoint)
    # results without the entry ``run`` come from a test that the user started; the folder is renamed, not removed
    if (job.test_folder / results_table.ABOUT).exists() and committed_records.read_run_entry(job.test_folder) is None:
        job.test_folder.rename(f"{job.test_folder}-{time.strftime('%Y%m%d-%H%M%S')}")
    remove(job.test_folder)
    model, options = f"--ckpt_path={job.checkpoint}", job.test
    if not job.config:
        model = f"--hf={job.training['model.path']}"
        options = options | {"model": {key: value for key, value in options["model"].items() if key != "path"}}
    file = _file(job, f".{job.test_folder.name}.test.yaml", options)
    _call(main, "test", model, *_trust(job.training), file, f"--output={job.test_folder}")
    committed_records.complete(job)


def _file(job: PlannedRun, suffix: str, config: dict[str, Any]) -> str:
    """Write a configuration to a file next to the run's folder, and return the flag that reads it."""
    path = job.sidecar(suffix)
    write(path, yaml.safe_dump(config, sort_keys=False))
    return f"--config={path}"


def _trust(config: dict[str, Any]) -> list[str]:
    """The flag that allows a test to import the user's own classes in this configuration; empty without such classes.

    Args:
        config: Configuration of the fit, with dotted keys.
    """
    packages = sorted({name.split(".")[0] for name in own_classes(config)})
    return [f"--trust={','.join(packages)}"] if packages else []


def remove(folder: Path) -> None:
    """Remove a folder if it exists."""
    if folder.exists():
        shutil.rmtree(folder)


def delete_run(job: PlannedRun) -> None:
    """Remove the folder of a run, so that it is trained again.

    Raises:
        UserError: If another process works on the run.
    """
    with locked(job, patient=False):
        remove(job.directory)


@contextlib.contextmanager
def locked(job: PlannedRun, patient: bool = True) -> Iterator[None]:
    """Return a context that holds the lock of a run, so that no other process works on the run.

    Args:
        job: The run.
        patient: Whether to wait until another process releases the lock, instead of raising an error.

    Raises:
        UserError: If another process holds the lock and ``patient`` is false.
    """
    path = job.sidecar(".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    file = lock(path, wait=patient)
    if isinstance(file, str):  # the description of the process that holds the lock
        raise UserError(f"{job.directory} is in use by {file}; wait until this process ends, or stop it")
    with file:
        yield
