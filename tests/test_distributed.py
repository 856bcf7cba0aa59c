"""Two processes over gloo against one: the same samples in the same order, the same losses, the same sums."""

import signal
from pathlib import Path

import pytest

from tests.disturbed import Fit, assert_same_state, interruption, prepare, same

PLAIN = {"model": {"dropout": 0.0}, "trainer": {"max_steps": 8, "num_sanity_val_steps": -1}}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="module")
def one(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Fit:
    """One process, two micro-batches of 4 samples a step, 8 steps, without dropout."""
    fit = Fit(tmp_path_factory.mktemp("one") / "fit", shards, **PLAIN)
    assert fit.start() == 0
    return fit


def steps(fit: Fit, processes: int, accumulate: int) -> list[tuple[float, list[list[int]]]]:
    """Mean loss and samples of each optimiser step, in order."""
    by_rank = [[row for (kind, _), row in fit.rows(r).items() if kind == "batch"] for r in range(processes)]
    in_order = [row for rows in zip(*by_rank, strict=True) for row in rows]
    size = accumulate * processes
    return [
        # Lightning's loss of a micro-batch is its share of the step's
        (sum(loss for loss, _ in step) / processes, [sample for _, tokens in step for sample in tokens])
        for step in (in_order[first : first + size] for first in range(0, len(in_order), size))
    ]


def assert_same_steps(ours: list[tuple[float, list[list[int]]]], theirs: list[tuple[float, list[list[int]]]]) -> None:
    """The same samples, and the same losses but for the order of the sums."""
    for (loss, samples), (their_loss, their_samples) in zip(ours, theirs, strict=True):
        assert samples == their_samples
        assert loss == pytest.approx(their_loss, rel=1e-5)


def test_two_processes_do_what_one_does(shards: Path, tmp_path: Path, one: Fit) -> None:
    trainer = PLAIN["trainer"] | {"accumulate_grad_batches": 1, "val_check_interval": 3}
    two = Fit(tmp_path / "two", shards, processes=2, model=PLAIN["model"], trainer=trainer)
    assert two.start() == 0
    assert_same_steps(steps(two, 2, 1), steps(one, 1, 2))
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


def test_another_number_of_processes_goes_on_with_the_next_sample(shards: Path, tmp_path: Path, one: Fit) -> None:
    moved = Fit(tmp_path / "moved", shards, **PLAIN)
    # one process and two micro-batches a step, stopped after 5 steps; then two processes and one
    assert moved.start(interruption("on_train_batch_end", 10, signal.SIGTERM)) == 143
    before = steps(moved, 1, 2)
    (moved.folder / "rank0.jsonl").unlink()
    moved.processes = 2
    trainer = {"devices": 2, "strategy": "ddp", "accumulate_grad_batches": 1, "val_check_interval": 3}
    moved.config["trainer"] |= trainer
    assert moved.start() == 0
    assert len(before) == 5
    assert_same_steps(before + steps(moved, 2, 1), steps(one, 1, 2))
