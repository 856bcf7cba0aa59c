"""Execution of one run (`Job`): it is fitted, tested, resumed or left alone, depending on its state."""

import contextlib
import fcntl
import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import yaml

import kerple
from kerple.base.atomic import write
from kerple.base.changes import differences
from kerple.base.errors import UserError
from kerple.base.shipped_configs import found
from kerple.compare.child import Child, Failed
from kerple.compare.collect import Run, read
from kerple.compare.comparison import Job
from kerple.compare.files import read_yaml
from kerple.compare.flat import flat

INSTALLED = Path(kerple.__file__).with_name("__main__.py")
CALLBACKS = "trainer.callbacks."
FILLED_IN = "trainer.default_root_dir"  # an option that a fit sets itself
_TICK = 0.25  # seconds between two looks at a lock
KNOWN = {"kerple", "pytorch_lightning"}  # of these a checkpoint may name what is offered
RUN = checkout if (checkout := Path(kerple.__file__).parents[2] / "run.py").is_file() else INSTALLED


def state(job: Job) -> dict[str, Any]:
    """The state of a run: ``config`` (null while it is removed), ``data``, whether it is ``fitted``, and ``tests``."""
    path = job.beside(".json")
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise UserError(
            f"compare: {path} is no JSON ({error}); remove it, and the run is taken over or refused"
        ) from error


def finished(job: Job) -> bool:
    """Whether the run was fitted, was tested with the present flags, and has results."""
    known = state(job)
    if not known.get("fitted") or not any(job.test_folder.glob("*.json")):
        return False
    done = known["tests"].get(job.test_folder.name)
    return done is not None and done | {"flags": _settings(done["flags"])} == asked_of_test(job)


def changes(job: Job, config: dict[str, Any]) -> list[str]:
    """Differences between the configuration that a run was started with and its present one, resolved and flat."""
    known = state(job).get("config")
    return [] if known is None else differences(known, config)


def of_other_data(job: Job, data: str | None) -> bool:
    """Whether a run was started on data with another checksum than this; one that an earlier version started has none.

    Args:
        job: The run.
        data: Checksum of its present data, see `kerple.compare.records.fingerprint`.
    """
    return state(job).get("data", data) != data


def run(
    job: Job,
    config: dict[str, Any],
    data: str | None,
    threads: int,
    say: Callable[[str], None],
    program: Path = RUN,
    begun: Callable[[Child], None] = lambda child: None,
) -> None:
    """Finish a run, whatever its state is. It can be killed at any time and called again.

    The state file records "fitted" only after the fit has ended well. Before that, the checkpoint decides: if there is
    one, the fit is resumed, else the folder is cleared. A child process that outlives its killed parent holds the run's
    lock, so that it is waited for, and no second process works in the same folder.

    Args:
        job: The run.
        config: Its resolved configuration, flat, which is recorded so that a later change is noticed.
        data: Checksum of its data, which is recorded too.
        threads: Number of CPU threads of the child process.
        say: Function that prints progress.
        program: The program that is run as ``run.py``.
        begun: Function that is called with the child process, which can be asked to stop from then on.

    Raises:
        Failed: If the fit or the test fails, the test leaves no numbers, the run is stopped, or another comparison has
            meanwhile started it with another configuration or other data.
    """
    child = Child(job, threads, program)
    begun(child)
    with child, _lock(job, say, child) as child.lock:
        if changed := changes(job, config):
            raise Failed(
                f"{job.name}: was started by another comparison with another configuration: {'; '.join(changed)}"
            )
        if of_other_data(job, data):
            raise Failed(f"{job.name}: was started by another comparison on data with another checksum")
        known = state(job)
        if known.get("config") is None:
            if known:  # `forget` was killed before its end
                _remove(job.directory)
            known = {"config": config, "data": data, "fitted": job.pretrained, "tests": {}}
            _write(job, known)
        known.setdefault("data", data)  # of a run that was made by hand, or by an earlier version
        if not job.pretrained and known["fitted"] and not finished(job) and not job.checkpoint.is_file():
            say(f"{job.name}: {job.checkpoint} is gone")
            known |= {"fitted": False, "tests": {}}
            _write(job, known)
        if not known["fitted"]:
            resume = job.checkpoint.is_file()
            if not resume:
                _remove(job.directory)
            say(f"{job.name}: {'resuming' if resume else 'fitting'}")
            # a path instead of "last", which would take the newest version of this folder, even one made by hand
            checkpoint = [f"--ckpt_path={job.checkpoint}"] if resume else []
            child.call("fit", *job.fit, *checkpoint)
            known |= {"fitted": True, "tests": {}}
            _write(job, known)
        if not finished(job):
            name = job.test_folder.name
            if job.test_folder.exists() and name not in known["tests"]:
                _set_aside(job.test_folder)
            _remove(job.test_folder)
            known["tests"][name] = None  # from now on the folder belongs to this comparison
            _write(job, known)
            say(f"{job.name}: testing")
            checkpoint = [] if job.pretrained else [f"--ckpt_path={job.checkpoint}"]
            child.call("test", *checkpoint, *_trust(config), *job.test)
            try:
                read([Run(job.label, job.seed, job.directory, name, job.part)])
            except UserError as error:
                raise Failed(f"{job.name}: its test left nothing to compare: {error}") from error
            known["tests"][name] = asked_of_test(job)
            _write(job, known)
        say(f"{job.name}: done")


def _remove(folder: Path) -> None:
    """Remove a folder; raise `Failed` if that fails, because old results would count as those of the next command."""
    try:
        if folder.exists():
            shutil.rmtree(folder)
    except OSError as error:
        raise Failed(f"{folder} cannot be removed ({error})") from error


def _trust(config: dict[str, Any]) -> list[str]:
    """The flag by which a test may import the classes of the user's own that the comparison names, as its fit did."""
    named = (str(value) for key, value in config.items() if key.endswith(".class_path"))
    packages = sorted({name.split(".")[0] for name in named if "." in name} - KNOWN)
    return [f"--trust={','.join(packages)}"] if packages else []


def asked_of_test(job: Job) -> dict[str, Any]:
    """The flags of a test, and the contents of the configurations among them."""
    paths = [flag.removeprefix("--config=") for flag in job.test if flag.startswith("--config=")]
    return {
        "flags": _settings(job.test),
        "configs": {path: yaml.safe_load(Path(found(path)).read_text()) for path in paths},
    }


def _settings(flags: Iterable[str]) -> list[str]:
    # a test counts also if the run was copied or has another path
    return [flag for flag in flags if not flag.startswith("--run_dir=")]


def objections(job: Job, config: dict[str, Any]) -> list[str]:
    """Reasons why a folder that was not made by `compare` cannot be taken for a run; empty if it can.

    Args:
        job: The run, whose directory exists without a state file.
        config: Its resolved configuration, flat. Options that are auto may have any value in the folder.

    Raises:
        UserError: If the folder's configuration cannot be read.
    """
    path = job.directory / "config.yaml"
    if not path.is_file() or not job.checkpoint.is_file():
        return ["has no config.yaml and checkpoints/last.ckpt"]
    written = flat(read_yaml(path))
    asked = {key: value for key, value in config.items() if value != "auto" and key != FILLED_IN}
    # a fit writes more options than a comparison resolves, but no more callbacks
    known = {key: value for key, value in written.items() if key in asked or key.startswith(CALLBACKS)}
    return differences(known, asked)


def only_tested_otherwise(job: Job) -> bool:
    """Whether the folder has the results of other tests of a run that was fitted elsewhere, so that this one cannot be
    tested here."""
    known = state(job)
    untested = known.get("fitted", False) and job.test_folder.name not in known["tests"]
    return untested and not job.test_folder.exists() and not (job.directory / "checkpoints").exists()


def declare_finished(job: Job, config: dict[str, Any], data: str | None, made: Path) -> None:
    """Take over a folder of results, without a checkpoint, of a run that was fitted and tested elsewhere.

    Args:
        job: The run; it does not exist, or was `only_tested_otherwise`.
        config: Its resolved configuration, flat.
        data: Checksum of its data.
        made: The folder, on the same disk; it is moved, or its test is where there are other tests.
    """
    with _lock(job, print):
        if not job.test_folder.exists():  # else another comparison was faster
            name = job.test_folder.name
            if job.directory.exists():
                (made / name).rename(job.test_folder)
            else:
                made.rename(job.directory)
            tests = state(job).get("tests", {}) | {name: asked_of_test(job)}
            _write(job, {"config": config, "data": data, "fitted": True, "tests": tests})


def adopt(job: Job, config: dict[str, Any]) -> None:
    """Take over a run that was made by `fit`, if there are no `objections`.

    It is resumed, which does nothing if it has ended, and then tested. The folder of an earlier test is renamed.
    """
    with _lock(job, print):
        if not state(job):  # else another comparison was faster
            _write(job, {"config": config, "fitted": False, "tests": {}})


def _set_aside(folder: Path) -> None:
    names = (folder.with_name(f"{folder.name}-by-hand-{n}") for n in itertools.count(1))
    folder.rename(next(name for name in names if not name.exists()))


def forget(job: Job) -> None:
    """Remove a run and its state, once no process works on it. It can be killed at any time.

    The state is removed last, because a folder without a state counts as not made by `compare`.
    """
    with _lock(job, print):
        _write(job, {"config": None, "fitted": False, "tests": {}})
        if job.directory.exists():
            shutil.rmtree(job.directory)
        job.beside(".json").unlink()


@contextlib.contextmanager
def _lock(job: Job, say: Callable[[str], None], child: Child | None = None) -> Iterator[int]:
    """Context in which no other process works on the run; a child that is stopped does not wait for it."""
    path = job.beside(".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        if not _locked(file):
            say(f"{job.name}: waiting for a process that is still at work in {job.directory}")
            while not _locked(file):
                if child is not None and child.stopped:
                    raise Failed(f"{job.name}: was stopped before it began")
                time.sleep(_TICK)
        yield file.fileno()


def _locked(file: IO[str]) -> bool:
    """Whether the lock of a file could be had."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks, so other processes cannot be kept out
        pass
    return True


def _write(job: Job, known: dict[str, Any]) -> None:
    write(job.beside(".json"), json.dumps(known, indent=1) + "\n")
