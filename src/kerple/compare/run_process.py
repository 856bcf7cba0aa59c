"""The process of one run of a comparison, which calls the commands `fit` and `test`.

The content of a run's folder determines the next step: a fit with a checkpoint is resumed, a finished fit is tested,
and a finished run is not changed. The process holds the run's lock. If the process outlives the command that started
it, the next command waits until the process ends.

Fit and test are forks of the process, because a fit on several devices leaves a process group and variables such as
LOCAL_RANK, with which a test could not start its ranks. The forks share the imported libraries.

``python -m kerple.compare.run_process < FOLDER/run.yaml`` repeats the process of a run. The paths in run.yaml are
relative to the folder in which the comparison was started.
"""

import contextlib
import os
import runpy
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

import kerple
from kerple.base.errors import UserError
from kerple.base.run_folder import lock
from kerple.compare import committed_records
from kerple.compare.planned_run import PlannedRun
from kerple.config.user_code_digests import trust_option
from kerple.measure import results_table

# the program with the commands `fit` and `test`: run.py in a checkout, __main__.py in an installed package
CHECKOUT, INSTALLED = Path(kerple.__file__).parents[2] / "run.py", Path(kerple.__file__).with_name("__main__.py")
PROGRAM = CHECKOUT if CHECKOUT.is_file() else INSTALLED
SHARED = ["pytorch_lightning"]  # libraries that fit and test share; importing them starts no thread and no CUDA


def main() -> None:
    """Finish the run that standard input describes, see `PlannedRun.description`, from any state of its folder.

    An argument is the reading end of a pipe, see `_kill_at_end`.
    """
    for pipe in map(int, sys.argv[1:]):
        threading.Thread(target=_kill_at_end, args=(pipe,), daemon=True).start()
    run = PlannedRun.read(sys.stdin.read())
    with locked(run):
        # another comparison may have finished the run while this process waited for the lock
        if not committed_records.finished(run):
            inputs = committed_records.current_inputs(run)
            for name, digest in inputs.items():
                if run.inputs.get(name, digest) != digest:
                    name = name.removeprefix(committed_records.OF_TEST)
                    sys.exit(f"{name} has changed since the comparison was started; run the command again")
            run = replace(run, inputs=run.inputs | inputs)  # the parent may have been trained since
            if changes := committed_records.changes(run):
                sys.exit(f"another command has made this run with another configuration: {'; '.join(changes)}")
            _finish(run)


def _finish(run: PlannedRun) -> None:
    """Fit and test a run, and add the entry ``run`` to its results. The fit is skipped if a test of it is complete."""
    resumed = run.checkpoint.is_file()
    # without a complete test, even a finished fit is resumed; it then ends immediately
    tests = run.directory.glob(f"*/{results_table.ABOUT}")
    is_tested = resumed and any(committed_records.read_run_entry(path.parent) for path in tests)
    if run.config and not resumed:
        remove(run.directory)
    committed_records.begin(run, resumed)
    if run.config and not is_tested:
        # not --ckpt_path=last, which prefers the newest numbered sibling folder, such as seed-1_v1 of a user's own fit
        checkpoint = [f"--ckpt_path={run.checkpoint}"] if resumed else []
        weights = {"weights": str(run.weights)} if run.weights else {}
        trust = trust_option(run.training) if run.weights and not run.config.get("trust") else []
        _call("fit", f"--output={run.directory}", *trust, *checkpoint, config=run.config | weights)
    # results without the entry ``run`` may come from a test that the user started; the folder is renamed, not removed
    if committed_records.has_test_of_user(run.test_folder):
        run.test_folder.rename(f"{run.test_folder}-{time.strftime('%Y%m%d-%H%M%S')}")
    remove(run.test_folder)
    model, options = f"--ckpt_path={run.checkpoint}", run.test
    if not run.config:
        model = f"--hf={run.training['model.path']}"
        options = options | {"model": {key: value for key, value in options["model"].items() if key != "path"}}
    _call("test", model, *trust_option(run.training), f"--output={run.test_folder}", config=options)
    committed_records.complete(run)


def _call(command: str, *flags: str, config: dict[str, Any]) -> None:
    """Print a command of the program without its configuration, and run it in a fork.

    The fork is killed if this process is killed. SIGTERM is passed on to the fork. SIGINT (Ctrl-C) is not, because a
    terminal sends it to both processes.

    Args:
        command: The command.
        *flags: Its flags other than ``--config``.
        config: Configuration of the command, which is a part of run.yaml.

    Raises:
        SystemExit: If the command fails, with its exit status. If a signal ends it, this process ends by the signal.
    """
    # Lightning starts the other ranks of a run with this command line
    sys.argv = [str(PROGRAM), command, f"--config={yaml.safe_dump(config, sort_keys=False)}", *flags]
    # an error message contains the last lines of the log, and the configuration would fill them
    print("$", shlex.join([str(PROGRAM), command, *flags]), "# with a --config from run.yaml", flush=True)
    for library in SHARED:
        import_module(library)
    end_of_pipe, held_by_this_process = os.pipe()
    if (fork := os.fork()) == 0:
        os.close(held_by_this_process)
        threading.Thread(target=_kill_at_end, args=(end_of_pipe,), daemon=True).start()
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    received = []

    def pass_on(number: int, _: object) -> None:
        received.append(number)
        if number == signal.SIGTERM:
            with contextlib.suppress(ProcessLookupError):
                os.kill(fork, number)

    handlers = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    status = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
    for number, handler in handlers.items():
        signal.signal(number, handler)
    os.close(end_of_pipe)
    os.close(held_by_this_process)
    if status > 0:
        sys.exit(status)
    if ended_by := [-status] if status else received:  # a command that had ended did not handle the signal
        os.kill(os.getpid(), ended_by[0])


def _kill_at_end(pipe: int) -> None:
    """Kill this process when the writing end of a pipe is closed, which its parent holds until the parent ends."""
    os.read(pipe, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def remove(folder: Path) -> None:
    """Remove a folder if it exists."""
    if folder.exists():
        shutil.rmtree(folder)


def delete_run(run: PlannedRun) -> None:
    """Remove the folder of a run, so that it is trained again.

    Raises:
        UserError: If another process works on the run.
    """
    with locked(run, wait=False):
        # first, because a run that has only the checkpoint left would be resumed with the new configuration
        run.checkpoint.unlink(missing_ok=True)
        remove(run.directory)


@contextlib.contextmanager
def locked(run: PlannedRun, wait: bool = True) -> Iterator[None]:
    """Return a context that holds the lock of a run, so that no other process works on the run.

    Args:
        run: The run.
        wait: Whether to wait until another process releases the lock, instead of raising an error.

    Raises:
        UserError: If another process holds the lock and ``wait`` is false.
    """
    path = run.sidecar(".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    file = lock(path, wait)
    if isinstance(file, str):  # the description of the process that holds the lock
        raise UserError(f"{run.directory} is in use by {file}; wait until this process ends, or stop it")
    with file:
        yield


if __name__ == "__main__":
    main()
