"""Two processes over gloo against one: the same samples in the same order, the same losses, the same sums."""

import signal
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.disturbed import Fit, assert_same_state, interruption, prepare, same

PLAIN = {"model": {"dropout": 0.0}, "trainer": {"max_steps": 8}}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("shards"))


def batches(fit: Fit, rank: int = 0) -> dict[int, list[Any]]:
    return {number: values for (kind, number), values in fit.rows(rank).items() if kind == "batch"}


def steps(fit: Fit, processes: int, accumulate: int) -> list[tuple[float, list[list[int]]]]:
    """Mean loss and samples of each optimiser step, in order."""
    found = []
    by_rank = [[values for _, values in sorted(batches(fit, rank).items())] for rank in range(processes)]
    assert len({len(rows) for rows in by_rank}) == 1
    for first in range(0, len(by_rank[0]), accumulate):
        parts = [rows[number] for number in range(first, first + accumulate) for rows in by_rank]
        samples = [sample for _, tokens in parts for sample in tokens]
        # Lightning's loss of a micro-batch is its share of the step's
        found.append((sum(loss for loss, _ in parts) / processes, samples))
    return found


def assert_same_steps(ours: list[tuple[float, list[list[int]]]], theirs: list[tuple[float, list[list[int]]]]) -> None:
    """The same samples, and the same losses but for the order of the sums."""
    for (loss, samples), (their_loss, their_samples) in zip(ours, theirs, strict=True):
        assert samples == their_samples
        assert loss == pytest.approx(their_loss, rel=1e-5)


def test_two_processes_do_what_one_does(shards: Path, tmp_path: Path) -> None:
    one = Fit(tmp_path / "one", shards, data={"batch_size": 8}, **PLAIN)
    two = Fit(tmp_path / "two", shards, processes=2, **PLAIN)
    assert one.start() == two.start() == 0
    assert_same_steps(steps(two, 2, 2), steps(one, 1, 2))
    for key, loss in one.rows().items():
        if key[0] == "validation":
            assert two.rows()[key] == pytest.approx(loss, rel=1e-5)
            assert two.rows(rank=1)[key] == two.rows()[key]


def test_two_processes_stopped_by_a_signal_to_one_and_by_a_kill_continue_in_every_bit(
    shards: Path, tmp_path: Path
) -> None:
    undisturbed, stopped = (Fit(tmp_path / name, shards, processes=2) for name in ("undisturbed", "stopped"))
    assert undisturbed.start() == 0
    assert stopped.start(interruption("on_train_batch_start", 6, signal.SIGTERM, rank=1)) == 143
    assert stopped.start(interruption("on_before_optimizer_step", 4)) == -signal.SIGKILL
    assert stopped.start() == 0
    for rank in (0, 1):
        assert stopped.rows(rank) == undisturbed.rows(rank)
    assert_same_state(stopped.checkpoint(), undisturbed.checkpoint())
    states = stopped.checkpoint()["random_states"]
    assert len(states) == 2
    assert not same(states[0]["torch"], states[1]["torch"])  # dropout differs between ranks


def test_another_number_of_processes_goes_on_with_the_next_sample(shards: Path, tmp_path: Path) -> None:
    one, moved = (Fit(tmp_path / name, shards, **PLAIN) for name in ("one", "moved"))
    assert one.start() == 0
    # one process and two micro-batches a step, stopped after 5 steps; then two processes and one
    assert moved.start(interruption("on_train_batch_end", 10, signal.SIGTERM)) == 143
    before = steps(moved, 1, 2)
    (moved.folder / "rank0.jsonl").unlink()
    moved.processes = 2
    moved.configure("trainer", devices=2, strategy="ddp", accumulate_grad_batches=1, val_check_interval=3)
    assert moved.start() == 0
    after = steps(moved, 2, 1)
    assert len(before) == 5
    assert_same_steps(before + after, steps(one, 1, 2))


@pytest.mark.slow
def test_four_processes_on_two_nodes_do_what_one_does_and_are_put_back_into_the_queue(
    shards: Path, tmp_path: Path
) -> None:
    data = {"batch_size": 16, "validation_segments": 16}
    one = Fit(tmp_path / "one", shards, data=data, **PLAIN)
    # DDP else lays its buckets out anew after its first step, and more than two numbers are added in another order
    trainer = PLAIN["trainer"] | {"strategy": "ddp_find_unused_parameters_true"}
    shared = {"model": PLAIN["model"], "data": data | {"batch_size": 4}, "trainer": trainer}
    four, stopped = (Fit(tmp_path / name, shards, 4, 2, **shared) for name in ("four", "stopped"))
    assert one.start() == four.start() == 0
    # the last process of the second node is told that the time is up; then a node is lost in the middle of a step
    assert stopped.start(interruption("on_train_batch_start", 5, signal.SIGUSR1, rank=3)) == 138
    assert stopped.start(interruption("on_before_optimizer_step", 3)) == -signal.SIGKILL
    assert stopped.start() == 0
    assert_same_steps(steps(four, 4, 2), steps(one, 1, 2))
    for rank in range(4):
        assert stopped.rows(rank) == four.rows(rank)
    assert_same_state(stopped.checkpoint(), four.checkpoint())
    assert len(stopped.checkpoint()["random_states"]) == 4
    # and a test by one, two and four processes comes to the same sums
    single, *others = (one.test(processes, [16, 32, 64]) for processes in (1, 2, 4))
    assert single["count"].min() > 0
    for table in others:
        pd.testing.assert_frame_equal(table, single, rtol=1e-12)
