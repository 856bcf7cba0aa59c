"""What a comparison shows while it works, in a file and in a terminal, and how it ends on Ctrl-C."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from kerple.base.progress import duration, line, note
from kerple.compare.board import Board
from kerple.compare.comparison import Job

FAKE = Path(__file__).with_name("fake_compare.py")
PATIENCE = 300  # seconds, for a machine that does other things beside


def started(folder: Path, step: float, output: int, **steps: str) -> subprocess.Popen:
    (folder / "base.yaml").write_text("{}")
    settings = {
        "name": "small",
        "base": [str(folder / "base.yaml")],
        "strategies": {"KerpleLog": {}, "ALiBi": {}, "NoPE": {}},
        "seeds": [1],
        "baseline": "ALiBi",
        "runs": str(folder / "runs"),
        "output": str(folder / "report"),
    }
    (folder / "compare.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    command = [sys.executable, str(FAKE), "--config", str(folder / "compare.yaml")]
    environment = os.environ | {"FAKE_STEP": str(step), "COLUMNS": "120", "TERM": "xterm-256color"} | steps
    return subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)


def until(happens: Callable[[], bool], process: subprocess.Popen) -> None:
    for _ in range(20 * PATIENCE):
        if happens():
            return
        assert process.poll() is None
        time.sleep(0.05)
    pytest.fail(f"it did not happen in {PATIENCE} seconds")


def test_a_file_gets_lines_of_progress_rows_as_they_come_and_a_report_after_the_first(tmp_path: Path) -> None:
    path, report = tmp_path / "output.txt", tmp_path / "report" / "report.html"
    with path.open("w") as output:
        process = started(tmp_path, 0.1, output.fileno())
        until(lambda: report.exists() and report.read_text().rstrip().endswith("</html>"), process)
        first = report.read_text()
        assert process.wait(PATIENCE) == 0
    assert "KerpleLog" in first
    assert "Not finished, and therefore not in this report: ALiBi seed 1, NoPE seed 1" in first
    text = path.read_text()
    assert "\x1b" not in text  # no codes of a terminal
    assert re.search(
        r"\[0/3 done, 1 running, 2 to do, about .* left\] KerpleLog seed 1: training, step \d+ of 20", text
    )
    assert re.search(r"\d+ s left, loss 4\.250, 1,234 tokens/s", text)
    rows = re.findall(r"^\[(\d)/3\] (\w+) seed 1: ppl \(full\) [\d.]+ at 64, [\d.]+ at 128$", text, re.MULTILINE)
    assert rows == [("1", "KerpleLog"), ("2", "ALiBi"), ("3", "NoPE")]
    assert "Not finished" not in report.read_text()


@pytest.mark.slow
def test_a_terminal_gets_a_live_table_and_ctrl_c_ends_all_of_it(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = started(tmp_path, 0.1, theirs, FAKE_STEP_ALiBi="2")  # far from its end whatever else keeps us
    os.close(theirs)
    text = ""

    def seen(pattern: str) -> Callable[[], bool]:
        def happens() -> bool:
            nonlocal text
            try:
                text += os.read(ours, 65536).decode(errors="replace")
            except OSError:
                pytest.fail(f"it ended before it showed {pattern!r}: {text}")
            return re.search(pattern, text) is not None

        return happens

    until(seen(r"0/3 done, 1 running, 2 to do"), process)
    until(seen(r"KerpleLog seed 1.*step 1\d of 20"), process)
    until(seen(r"\[1/3\] KerpleLog seed 1: ppl"), process)
    until(lambda: (tmp_path / "runs/ALiBi/seed-1/checkpoints/last.ckpt").exists() and seen("")(), process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to everyone in the foreground
    while True:
        try:
            text += os.read(ours, 65536).decode(errors="replace")
        except OSError:  # the other end is closed: no child is alive either
            break
    assert process.wait(PATIENCE) == 130
    assert "stopped: 1 of 3 runs are done" in text
    assert re.search(r"ALiBi seed 1: will be resumed from \S*ALiBi/seed-1/checkpoints/last\.ckpt", text)
    assert "the same command goes on from there and starts the other 1" in text
    assert "Traceback" not in text

    with (tmp_path / "again.txt").open("w") as output:
        assert started(tmp_path, 0.001, output.fileno()).wait(PATIENCE) == 0
    resumed = [
        json.loads(start)["resume"] for start in (tmp_path / "runs/ALiBi/seed-1.starts").read_text().splitlines()
    ]
    assert resumed == [False, True]
    assert "3 runs: 1 finished, 2 to do" in (tmp_path / "again.txt").read_text()


def job(folder: Path, label: str) -> Job:
    return Job(label, 1, folder / label / "seed-1", ("--fit",), (f"--run_dir={folder / label / 'seed-1' / 'test'}",))


def test_time_left_and_the_offer_of_a_smaller_one_follow_from_the_pace_of_the_first_run(tmp_path: Path) -> None:
    work = [job(tmp_path, label) for label in ("A", "B", "C", "D")]
    out = StringIO()
    board = Board(work, work, 1, Console(file=out, width=200))
    with board:
        board.advise(8, "make demo STEPS={steps}")
        assert out.getvalue() == ""  # nothing is known yet
        work[0].directory.parent.mkdir()
        note(work[0].beside(".progress"), doing="training", done=1, of=2000, since=1, left=1e5, **{"for": 50.0})
        board.advise(8, "make demo STEPS={steps}")
        assert out.getvalue() == ""  # a first step is slow
        # 100 of 2,000 steps in 60 s: 1,200 s a run, 4,740 s for what is left of four
        told = {
            "doing": "training",
            "done": 100,
            "of": 2000,
            "for": 60.0,
            "since": 100,
            "left": 1140.0,
            "tokens_per_second": 1700.0,
        }
        note(work[0].beside(".progress"), **told)
        assert board.left(board.running()) == pytest.approx(1140 + 3 * 1200)
        board.advise(8, "make demo STEPS={steps}")
        board.advise(8, "make demo STEPS={steps}")
    assert out.getvalue().count("make demo") == 1
    assert "all of it takes about 79 min, at 1,700 tokens a second;" in out.getvalue()
    (steps,) = re.findall(r"STEPS=(\d+)", out.getvalue())
    assert int(steps) == 200  # 2,000 steps × 480 s / 4,740 s, rounded down


def test_an_offer_may_hold_braces_of_its_own(tmp_path: Path) -> None:
    work, out = [job(tmp_path, label) for label in ("A", "B")], StringIO()
    board = Board(work, work, 1, Console(file=out, width=200))
    with board:
        work[0].directory.parent.mkdir()
        told = {"doing": "training", "done": 100, "of": 2000, "for": 60.0, "since": 100, "left": 1140.0}
        note(work[0].beside(".progress"), **told, tokens_per_second=1700.0)
        board.advise(8, "compare --flags '{trainer.max_steps: {steps}}'")
    assert "`compare --flags '{trainer.max_steps: 410}'`" in out.getvalue()


def test_a_run_that_is_about_to_begin_has_all_its_time_before_it_and_one_in_its_test_hardly_any(tmp_path: Path) -> None:
    work = [job(tmp_path, label) for label in ("A", "B")]
    for one in work:
        one.directory.parent.mkdir()
    training = {"doing": "training", "done": 100, "of": 200, "for": 60.0, "since": 100, "left": 60.0}
    with Board(work, work, 1, Console(file=StringIO(), width=200)) as board:
        note(work[0].beside(".progress"), **training)
        assert board.left(board.running()) == pytest.approx(60 + 120)
        note(work[0].beside(".progress"), doing="testing")
        assert board.left(board.running()) == pytest.approx(12 + 120)  # its pace is not forgotten
        board.took = [120.0]
        board.ended(work[0], well=True)
        note(work[1].beside(".progress"), doing="fitting")
        assert board.left(board.running()) == pytest.approx(120)


def test_a_machine_that_is_fast_enough_is_offered_nothing_smaller(tmp_path: Path) -> None:
    work = [job(tmp_path, "A")]
    work[0].directory.parent.mkdir()
    out = StringIO()
    with Board(work, work, 1, Console(file=out, width=200)) as board:
        told = {
            "doing": "training",
            "done": 100,
            "of": 2000,
            "for": 20.0,
            "since": 100,
            "left": 380.0,
            "tokens_per_second": 9e3,
        }
        note(work[0].beside(".progress"), **told)
        board.advise(8, "make demo STEPS={steps}")
    assert "make demo" not in out.getvalue()
    assert "about 6 min" in out.getvalue()


def test_durations_and_lines_as_a_person_says_them() -> None:
    assert [duration(seconds) for seconds in (0.4, 89, 95, 3700, 7500)] == [
        "0 s",
        "89 s",
        "2 min",
        "62 min",
        "2 h 05 min",
    ]
    assert line({"doing": "testing", "done": 3, "of": 64, "left": 10}) == "testing, block 3 of 64, 10 s left"
    assert line({"doing": "testing", "done": 15.58, "of": 16, "left": 0.2}) == "testing, block 16 of 16"
    assert line({}) == "starting"
