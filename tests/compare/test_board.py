"""What a comparison shows while it works, in a file and in a terminal."""

from io import StringIO
from pathlib import Path

from rich.console import Console

from kerple.base.progress import FILE, write_progress
from kerple.compare.board import Board
from kerple.compare.comparison import Job


def jobs(folder: Path, number: int = 4) -> list[Job]:
    directories = [folder / f"seed-{seed}" for seed in range(number)]
    return [Job("ALiBi", i, "", d, d / "test", ["--fit"], [], {}) for i, d in enumerate(directories)]


def training(job: Job, seconds: float, left: float) -> None:
    state = {"stage": "training", "done": 40, "total": 400, "seconds": seconds, "done_since_start": 9, "loss": 4.25}
    write_progress(job.directory / FILE, **state, seconds_left=left, tokens_per_second=1234.0)


def test_it_shows_a_test_instead_of_the_fit_before_it_and_text_with_brackets(tmp_path: Path) -> None:
    output, todo = StringIO(), jobs(tmp_path)
    training(todo[0], 1.0, 1.0)  # left by a run that was stopped
    with Board(5, todo, 2, Console(file=output, width=200, highlight=False)) as board:
        assert board.running() == {}
        training(todo[1], 600.0, 0.0)
        write_progress(todo[1].test_folder / FILE, stage="testing, full at 64", done=1, total=8)
        assert [progress["stage"] for progress in board.running().values()] == ["testing, full at 64"]
        board.print("a line [with brackets]")
    assert "[1/5] a line [with brackets]" in output.getvalue()


def test_time_left_is_of_what_runs_and_what_waits_and_a_smaller_comparison_is_suggested(tmp_path: Path) -> None:
    output, todo = StringIO(), jobs(tmp_path)
    board = Board(4, todo, 2, Console(file=output, width=200))
    assert board.left(board.running()) is None
    assert not board.advise(4, "make demo STEPS={steps}")
    training(todo[0], 5.0, 95.0)
    assert board.left(board.running()) is None  # too early to say
    training(todo[0], 60.0, 40.0)
    training(todo[1], 60.0, 60.0)
    # 40 + 60 s of those at work, two more of 110 s each, two at a time
    assert board.left(board.running()) == (40 + 60 + 2 * 110) / 2
    assert board.advise(2, "make demo STEPS={steps}")
    # 160 s, of which 2 minutes are 120 / 160 of 400 steps
    assert "about 3 min; Ctrl-C and `make demo STEPS=300` for what takes about 2 min" in output.getvalue()
