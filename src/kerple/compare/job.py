"""One run of a comparison: fitted, tested, resumed or left alone, whatever had happened to it before."""

import contextlib
import fcntl
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

import kerple
from kerple.compare.child import Child, Failed
from kerple.compare.comparison import Job
from kerple.errors import UserError
from kerple.report.flat import flat
from kerple.runs.configs import found
from kerple.runs.older import as_today, options_as_today
from kerple.runs.whole import write

INSTALLED = Path(kerple.__file__).with_name("__main__.py")
RUN = checkout if (checkout := Path(kerple.__file__).parents[2] / "run.py").is_file() else INSTALLED


def state(job: Job) -> dict[str, Any]:
    """What is known of a run: the ``config`` it was started with (null: it is being removed), whether it is ``fitted``,
    the flags of ``tests`` done."""
    path = job.beside(".json")
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise UserError(
            f"compare: {path} is no JSON ({error}); remove it, and the run is taken over or refused"
        ) from error


def finished(job: Job) -> bool:
    """Whether the run was fitted and tested as it is to be tested, and the results are there."""
    known = state(job)
    if not known.get("fitted") or not any(job.test_folder.glob("*.json")):
        return False
    done = known["tests"].get(job.test_folder.name)
    return done is not None and done | {"flags": _settings(done["flags"])} == asked_of_test(job)


def differences(job: Job, config: dict[str, Any]) -> list[str]:
    """Keys, with both values, in which a run was started with another configuration than the one asked for now.

    Args:
        job: The run.
        config: Its resolved configuration, flat.
    """
    known = state(job).get("config")
    if known is None:
        return []
    known, missing = options_as_today(known), "(not there)"
    pairs = {key: (known.get(key, missing), config.get(key, missing)) for key in (known | config)}
    return [f"{key}: {before!r} -> {now!r}" for key, (before, now) in pairs.items() if before != now]


def run(
    job: Job,
    config: dict[str, Any],
    threads: int,
    say: Callable[[str], None],
    program: Path = RUN,
    begun: Callable[[Child], None] = lambda child: None,
) -> None:
    """Bring a run to its end from wherever it is. Safe to kill at any point and to call again.

    The state file says only what is certain: "fitted" is written after the fit has ended well. Between, the checkpoint
    decides: with one the fit is resumed, without one the folder is cleared. A child that outlives a killed parent holds
    the run's lock, so it is waited for instead of being joined by a second one in the same folder.

    Args:
        job: The run.
        config: Its resolved configuration, flat; recorded, so that a change is seen later.
        threads: CPU threads for the child.
        say: Where progress goes.
        program: What is called as ``run.py``.
        begun: Given the process of the run, which may be asked to stop.

    Raises:
        Failed: If the fit or the test fails, or another comparison has started the run with another configuration since
            this one looked.
    """
    with _lock(job, say) as lock, Child(job, threads, lock, program) as child:
        begun(child)
        if changed := differences(job, config):
            raise Failed(
                f"{job.name}: was started by another comparison with another configuration: {'; '.join(changed)}"
            )
        known = state(job)
        if known.get("config") is None:
            if known:  # `forget` was killed
                shutil.rmtree(job.directory, ignore_errors=True)
            known = {"config": config, "fitted": job.pretrained, "tests": {}}
            _write(job, known)
        if not job.pretrained and known["fitted"] and not finished(job) and not job.checkpoint.is_file():
            say(f"{job.name}: {job.checkpoint} is gone")
            known |= {"fitted": False, "tests": {}}
            _write(job, known)
        if not known["fitted"]:
            resume = job.checkpoint.is_file()
            if not resume:
                shutil.rmtree(job.directory, ignore_errors=True)
            say(f"{job.name}: {'resuming' if resume else 'fitting'}")
            # not "last": that is of the newest version beside this folder, which somebody may have made by hand
            checkpoint = [f"--ckpt_path={job.checkpoint}"] if resume else []
            child.call("fit", *job.fit, *checkpoint)
            known |= {"fitted": True, "tests": {}}
            _write(job, known)
        if not finished(job):
            name = job.test_folder.name
            if job.test_folder.exists() and name not in known["tests"]:
                _set_aside(job.test_folder)
            shutil.rmtree(job.test_folder, ignore_errors=True)
            known["tests"][name] = None  # from here on the folder is ours
            _write(job, known)
            say(f"{job.name}: testing")
            checkpoint = [] if job.pretrained else [f"--ckpt_path={job.checkpoint}"]
            child.call("test", *checkpoint, *job.test)
            known["tests"][name] = asked_of_test(job)
            _write(job, known)
        say(f"{job.name}: done")


def asked_of_test(job: Job) -> dict[str, Any]:
    """What a test is asked for: its flags, and what the configs among them say."""
    paths = [flag.removeprefix("--config=") for flag in job.test if flag.startswith("--config=")]
    return {
        "flags": _settings(job.test),
        "configs": {path: yaml.safe_load(Path(found(path)).read_text()) for path in paths},
    }


def _settings(flags: Iterable[str]) -> list[str]:
    # a run that is copied or found by another path was tested all the same
    return [flag for flag in flags if not flag.startswith("--run_dir=")]


def objections(job: Job, config: dict[str, Any]) -> list[str]:
    """Why a folder that compare did not make cannot be taken for a run, empty if it can.

    Args:
        job: The run; its directory exists, its state does not.
        config: Its resolved configuration, flat. What it leaves open (null, auto), the folder's run may have filled
            in.
    """
    path = job.directory / "config.yaml"
    if not path.is_file() or not job.checkpoint.is_file():
        return ["has no config.yaml and checkpoints/last.ckpt"]
    written = flat(as_today(yaml.safe_load(path.read_text())))
    pairs = {key: (written.get(key), now) for key, now in config.items() if now not in (None, "auto")}
    return [f"{key}: {before!r} -> {now!r}" for key, (before, now) in pairs.items() if before != now]


def declare_finished(job: Job, config: dict[str, Any]) -> None:
    """Note that a run has been fitted and tested elsewhere; its results are in its folder, its checkpoint is not."""
    _write(job, {"config": config, "fitted": True, "tests": {job.test_folder.name: asked_of_test(job)}})


def adopt(job: Job, config: dict[str, Any]) -> None:
    """Take over a run that `fit` has written by hand, once there are no `objections`.

    It is resumed, which does nothing if it has ended, and then tested. Its own test is set aside, not removed.
    """
    _write(job, {"config": config, "fitted": False, "tests": {}})


def _set_aside(folder: Path) -> None:
    names = (folder.with_name(f"{folder.name}-by-hand-{n}") for n in itertools.count(1))
    folder.rename(next(name for name in names if not name.exists()))


def forget(job: Job) -> None:
    """Remove a run and what is known of it, when nobody is at work in it any more. Safe to kill at any point.

    The state goes last: a folder without one is taken for somebody else's.
    """
    with _lock(job, print):
        _write(job, {"config": None, "fitted": False, "tests": {}})
        if job.directory.exists():
            shutil.rmtree(job.directory)
        job.beside(".json").unlink()


@contextlib.contextmanager
def _lock(job: Job, say: Callable[[str], None]) -> Iterator[int]:
    path = job.beside(".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{job.name}: waiting for a process that is still at work in {job.directory}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _write(job: Job, known: dict[str, Any]) -> None:
    write(job.beside(".json"), json.dumps(known, indent=1) + "\n")
