"""Execution of one run of a comparison: after an interruption at any point, calling it again gives the same result."""

import errno
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from kerple.compare.child import Failed
from kerple.compare.flat import flat

from kerple.compare import engines
from kerple.compare import job as jobs
from kerple.compare.comparison import Job

FAKE = Path(__file__).parent / "fake_run.py"
CONFIG = {"model.position.class_path": "KerpleLog", "trainer.max_steps": 20}


def job(
    folder: Path, position: str = "KerpleLog", seed: int = 1, test: tuple[str, ...] = (), into: str = "test"
) -> Job:
    directory = folder / position / f"seed-{seed}"
    fit = (f"--seed_everything={seed}", f"--run_dir={directory}", f"--model.position={position}")
    return Job(position, seed, directory, fit, (*test, f"--run_dir={directory / into}"))


def starts(run: Job) -> list[bool]:
    """Of each fit that was started: whether it was told to resume."""
    return [json.loads(line)["resume"] for line in run.beside(".starts").read_text().splitlines()]


def result(run: Job) -> str:
    return (run.directory / "test" / "extrapolation.json").read_text()


def test_a_run_is_fitted_and_tested_once(tmp_path: Path) -> None:
    run, said = job(tmp_path), []
    jobs.run(run, CONFIG, None, 1, said.append, FAKE)
    first = result(run)
    jobs.run(run, CONFIG, None, 1, said.append, FAKE)
    assert jobs.finished(run)
    assert starts(run) == [False]
    assert result(run) == first
    assert said == [f"KerpleLog seed 1: {what}" for what in ("fitting", "testing", "done", "done")]


def test_a_test_trusts_the_packages_whose_classes_the_comparison_names(tmp_path: Path) -> None:
    program = tmp_path / "told.py"
    program.write_text(f"import runpy, sys; print('told', *sys.argv[1:]); runpy.run_path({str(FAKE)!r})")
    own = {"data.init_args.task.class_path": "my_task.Rotate", "data.class_path": "kerple.tasks.TaskData"}
    own |= {"model.position.class_path": "mine.biases.Root", "model.position.init_args.first.class_path": "my_task.B"}
    for config, trusted in ((CONFIG, []), (own, ["--trust=mine,my_task"])):
        run = job(tmp_path, seed=1 + len(trusted))
        jobs.run(run, config, None, 1, lambda _: None, program)
        (fit, test) = [line.split() for line in run.beside(".log").read_text().splitlines() if line.startswith("told")]
        assert [flag for flag in test if flag.startswith("--trust")] == trusted
        assert not [flag for flag in fit if flag.startswith("--trust")]
        assert jobs.finished(run)


def test_another_test_tests_again_and_does_not_fit_again(tmp_path: Path) -> None:
    jobs.run(job(tmp_path), CONFIG, None, 1, lambda _: None, FAKE)
    again = job(tmp_path, test=("--trainer.precision=32-true",))
    (again.directory / "test" / "left over").touch()
    jobs.run(again, CONFIG, None, 1, lambda _: None, FAKE)
    assert starts(again) == [False]
    assert [path.name for path in (again.directory / "test").iterdir()] == ["extrapolation.json"]


def test_a_config_of_the_test_that_changes_tests_again(tmp_path: Path) -> None:
    config = tmp_path / "analyses.yaml"
    config.write_text("trainer: {callbacks: []}")
    run = job(tmp_path, test=(f"--config={config}",))
    jobs.run(run, CONFIG, None, 1, lambda _: None, FAKE)
    config.write_text("# the same, said otherwise\ntrainer:\n  callbacks: []\n")
    assert jobs.finished(run)
    config.write_text("trainer: {callbacks: [Kernels]}")
    assert not jobs.finished(run)


def test_where_a_run_lies_is_no_setting_of_its_test(tmp_path: Path) -> None:
    run = job(tmp_path, test=("--trainer.precision=32-true",))
    jobs.run(run, CONFIG, None, 1, lambda _: None, FAKE)
    known = jobs.state(run)
    assert known["tests"]["test"]["flags"] == ["--trainer.precision=32-true"]
    # as it was written while the place was among the flags
    known["tests"]["test"]["flags"].append("--run_dir=somewhere/else/test")
    run.beside(".json").write_text(json.dumps(known))
    assert jobs.finished(run)
    assert not jobs.finished(job(tmp_path))


def test_a_run_without_results_is_not_finished(tmp_path: Path) -> None:
    run = job(tmp_path)
    jobs.run(run, CONFIG, None, 1, lambda _: None, FAKE)
    (run.test_folder / "extrapolation.json").unlink()
    assert not jobs.finished(run)
    jobs.run(run, CONFIG, None, 1, lambda _: None, FAKE)
    assert jobs.finished(run)
    assert starts(run) == [False]


def test_a_run_whose_checkpoint_was_removed_is_fitted_again_once_a_test_needs_it(tmp_path: Path) -> None:
    run, said = job(tmp_path), []
    jobs.run(run, CONFIG, None, 1, lambda _: None, FAKE)
    first = result(run)
    run.checkpoint.unlink()
    assert jobs.finished(run)  # its results are all that is asked for
    sliding = job(tmp_path, into="sliding")
    jobs.run(sliding, CONFIG, None, 1, said.append, FAKE)
    assert said[0] == f"KerpleLog seed 1: {run.checkpoint} is gone"
    assert starts(run) == [False, False]
    assert jobs.finished(sliding)
    assert not jobs.finished(run)  # its test was of the run before
    jobs.run(run, CONFIG, None, 1, lambda _: None, FAKE)
    assert result(run) == first
    assert starts(run) == [False, False]


def test_two_tests_of_one_run_do_not_touch_each_other(tmp_path: Path) -> None:
    jobs.run(job(tmp_path), CONFIG, None, 1, lambda _: None, FAKE)
    sliding = job(tmp_path, into="sliding")
    assert not jobs.finished(sliding)
    jobs.run(sliding, CONFIG, None, 1, lambda _: None, FAKE)
    assert jobs.finished(sliding)
    assert jobs.finished(job(tmp_path))
    assert starts(sliding) == [False]
    assert (sliding.directory / "sliding" / "extrapolation.json").read_text() == result(sliding)


def test_a_changed_configuration_is_named_key_by_key(tmp_path: Path) -> None:
    run = job(tmp_path)
    assert jobs.changes(run, CONFIG) == []
    jobs.run(run, CONFIG, None, 1, lambda _: None, FAKE)
    changed = {"model.position.class_path": "KerpleLog", "trainer.max_steps": 21, "data.length": 64}
    assert jobs.changes(run, changed) == ["trainer.max_steps: 20 -> 21", "data.length: (not there) -> 64"]
    jobs.forget(run)
    assert jobs.changes(run, changed) == []
    assert not run.directory.exists()


def test_a_run_made_before_an_option_existed_goes_on_with_the_default_of_it(tmp_path: Path) -> None:
    run = job(tmp_path)
    jobs.run(run, CONFIG, None, 1, lambda _: None, FAKE)
    assert jobs.changes(run, CONFIG | {"model.qk_norm": False}) == []
    assert jobs.changes(run, CONFIG | {"model.qk_norm": True}) == ["model.qk_norm: (not there) -> True"]


def test_a_version_that_somebody_made_beside_it_is_not_resumed_in_its_place(tmp_path: Path) -> None:
    undisturbed, run = job(tmp_path / "undisturbed"), job(tmp_path)
    jobs.run(undisturbed, CONFIG, None, 1, lambda _: None, FAKE)
    finished = json.loads(undisturbed.checkpoint.read_text())
    for checkpoint, step in ((run.checkpoint, 5), (run.directory.with_name("seed-1_v1") / "checkpoints/last.ckpt", 20)):
        checkpoint.parent.mkdir(parents=True)
        value = 1
        for i in range(step):
            value = (value * 31 + i) % 1009
        checkpoint.write_text(json.dumps(finished | {"step": step, "value": value}))
    (run.directory / "config.yaml").write_text((undisturbed.directory / "config.yaml").read_text())
    run.beside(".json").write_text(json.dumps({"config": CONFIG, "fitted": False, "tests": {}}))
    jobs.run(run, CONFIG, None, 1, lambda _: None, FAKE)
    assert json.loads(run.checkpoint.read_text()) == finished
    assert result(run) == result(undisturbed)


def test_a_run_that_another_comparison_started_otherwise_meanwhile_is_not_ours(tmp_path: Path) -> None:
    run = job(tmp_path)
    jobs.run(run, CONFIG, None, 1, lambda _: None, FAKE)  # the other one, while we waited for the lock
    with pytest.raises(Failed, match=r"another configuration: trainer\.max_steps: 20 -> 40"):
        jobs.run(run, CONFIG | {"trainer.max_steps": 40}, None, 1, lambda _: None, FAKE)
    assert starts(run) == [False]


def test_a_run_at_work_is_not_removed_under_it(tmp_path: Path) -> None:
    run = job(tmp_path)
    context = multiprocessing.get_context("fork")
    working = context.Process(target=_process, args=(run, FAKE, False))
    working.start()
    while not run.beside(".starts").exists():
        time.sleep(0.01)
    jobs.forget(run)
    working.join()
    assert working.exitcode == 0  # it came to its end
    assert not run.directory.exists()


def test_a_run_that_is_stopped_while_another_process_has_it_ends_at_once(tmp_path: Path) -> None:
    run = job(tmp_path)
    with jobs._lock(run, print):
        waiting = engines.local([(run, CONFIG, None)], 1)
        assert next(waiting) is None
        before = time.monotonic()
        waiting.close()
        assert time.monotonic() - before < 5
    assert not run.beside(".starts").exists()


def test_a_state_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    run = job(tmp_path)
    run.directory.mkdir(parents=True)
    run.beside(".json").write_text("")
    with pytest.raises(ValueError, match=r"seed-1\.json is no JSON"):
        jobs.finished(run)


def test_a_failure_shows_the_end_of_what_was_printed(tmp_path: Path) -> None:
    run = job(tmp_path, "fail")
    with pytest.raises(Failed, match=r"(?s)fail seed 1: fit ended with status 1, see .*is not a position"):
        jobs.run(run, CONFIG, None, 1, lambda _: None, FAKE)
    assert not jobs.finished(run)


def _process(run: Job, fake: Path, group: bool) -> None:
    if group:
        os.setsid()
    jobs.run(run, CONFIG, None, 1, lambda _: None, fake)


@pytest.mark.parametrize("whole_group", [True, False])
def test_killed_at_any_point_it_ends_the_same(
    tmp_path: Path, whole_group: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 of the process and its child (a power cut), or of the process alone (the child goes on, and is waited
    for)."""
    undisturbed = job(tmp_path / "undisturbed")
    jobs.run(undisturbed, CONFIG, None, 1, lambda _: None, FAKE)
    run = job(tmp_path / "killed")
    context = multiprocessing.get_context("fork")
    monkeypatch.setenv("FAKE_STEP", "0.02")
    checkpoint = run.directory / "checkpoints" / "last.ckpt"
    for sign in (run.beside(".starts"), checkpoint, checkpoint, run.test_folder):
        before = sign.stat().st_mtime_ns if sign.exists() else None
        process = context.Process(target=_process, args=(run, FAKE, whole_group))
        process.start()
        while whole_group and os.getpgid(process.pid) != process.pid:  # it has no group of its own yet
            time.sleep(0.001)
        while process.is_alive() and (not sign.exists() or sign.stat().st_mtime_ns == before):
            time.sleep(0.002)
        if whole_group:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.join()
    jobs.run(run, CONFIG, None, 1, lambda _: None, FAKE)

    assert result(run) == result(undisturbed)
    assert jobs.finished(run)
    assert True in starts(run)  # it was met at work
    assert "Error" not in run.beside(".log").read_text()  # no two were ever at work in one folder


def test_a_run_that_began_on_other_data_is_not_gone_on_with(tmp_path: Path) -> None:
    run = job(tmp_path)
    jobs.run(run, CONFIG, "a", 1, lambda _: None, FAKE)
    jobs.run(run, CONFIG, "a", 1, lambda _: None, FAKE)
    assert jobs.of_other_data(run, "b")
    with pytest.raises(Failed, match="data with another checksum"):
        jobs.run(run, CONFIG, "b", 1, lambda _: None, FAKE)
    state = json.loads(run.beside(".json").read_text())
    del state["data"]  # as an earlier version wrote it
    run.beside(".json").write_text(json.dumps(state))
    assert not jobs.of_other_data(run, "b")


def test_a_test_without_numbers_is_a_failure_of_its_own_run(tmp_path: Path) -> None:
    run = job(tmp_path, "Unmeasured")
    with pytest.raises(Failed, match=r"Unmeasured seed 1: its test left nothing to compare: .*no result rows"):
        jobs.run(run, CONFIG, None, 1, lambda _: None, FAKE)
    assert not jobs.finished(run)


def test_old_results_that_cannot_be_removed_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs.run(job(tmp_path), CONFIG, None, 1, lambda _: None, FAKE)
    again = job(tmp_path, test=("--trainer.precision=32-true",))

    def fail(folder: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(f"{folder} is of root")

    monkeypatch.setattr(jobs.shutil, "rmtree", fail)
    with pytest.raises(Failed, match=r"cannot be removed .* is of root"):
        jobs.run(again, CONFIG, None, 1, lambda _: None, FAKE)
    assert not jobs.finished(again)


def test_without_locks_nobody_is_kept_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(jobs.fcntl, "flock", none)
    run = job(tmp_path)
    jobs.run(run, CONFIG, None, 1, lambda _: None, FAKE)
    assert jobs.finished(run)


def test_a_run_that_another_comparison_has_taken_over_stays_as_it_is(tmp_path: Path) -> None:
    run = job(tmp_path)
    jobs.run(run, CONFIG, None, 1, lambda _: None, FAKE)
    jobs.adopt(run, CONFIG)
    assert jobs.finished(run)


def test_a_run_by_hand_with_a_callback_more_is_another(tmp_path: Path) -> None:
    run = job(tmp_path)
    jobs.run(run, CONFIG, None, 1, lambda _: None, FAKE)
    callback = {"class_path": "pytorch_lightning.callbacks.EarlyStopping", "init_args": {"monitor": "val/loss"}}
    path = run.directory / "config.yaml"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"trainer": {"callbacks": [callback]}}))
    asked = {"data.init_args.length": 64}
    assert jobs.objections(run, asked | flat({"trainer": {"callbacks": [callback]}})) == []
    assert len(jobs.objections(run, asked)) == 2  # its class and its option


POLITE = """
import signal, sys, time
from pathlib import Path
place = Path(next(a.split("=", 1)[1] for a in sys.argv if a.startswith("--run_dir=")))
place.mkdir(parents=True)
def save(*_):
    (place / "asked").write_text(str(time.monotonic()))
    time.sleep(1)
    (place / "saved").write_text(str(time.monotonic()))
    sys.exit(1)
signal.signal(signal.SIGTERM, save)
(place / "started").touch()
time.sleep(600)
"""


def test_runs_that_are_stopped_save_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.py").write_text(POLITE)
    monkeypatch.setattr(jobs, "RUN", tmp_path / "run.py")
    runs = [job(tmp_path, seed=seed) for seed in (1, 2, 3)]
    working = engines.local([(run, CONFIG, None) for run in runs], 3)
    while not all((run.directory / "started").exists() for run in runs):
        next(working)
    working.close()
    asked, saved = ([float((run.directory / name).read_text()) for run in runs] for name in ("asked", "saved"))
    assert max(asked) < min(saved)
