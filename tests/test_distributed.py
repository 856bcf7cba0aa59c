"""Two processes over gloo against one: the same samples in the same order, the same losses, the same sums."""

import signal
from pathlib import Path

import pytest

from tests.disturbed import Fit, assert_same_state, interruption, prepare, same

PLAIN = {"model": {"dropout": 0.0}, "trainer": {"max_steps": 8, "num_sanity_val_steps": -1}}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("shards"))


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
    """Two micro-batches of 4 samples a step in one process, 8 steps; and so for 5 steps, then one in each of two."""
    one, moved = (Fit(tmp_path / name, shards, **PLAIN) for name in ("one", "moved"))
    assert one.start() == 0
    assert moved.start(interruption("on_train_batch_end", 10, signal.SIGTERM)) == 143
    before = steps(moved, 1, 2)
    (moved.folder / "rank0.jsonl").unlink()
    moved.processes = 2
    moved.config["trainer"] |= {"devices": 2, "strategy": "ddp", "accumulate_grad_batches": 1, "val_check_interval": 3}
    assert moved.start() == 0
    after = steps(moved, 2, 1)
    assert (len(before), len(after)) == (5, 3)
    for (loss, samples), (their_loss, their_samples) in zip(before + after, steps(one, 1, 2), strict=True):
        assert samples == their_samples
        assert loss == pytest.approx(their_loss, rel=1e-5)  # but for the order of the sums
    validations = {key: loss for key, loss in moved.rows().items() if key[0] == "validation"}
    assert ("validation", 6) in validations
    for key, loss in validations.items():
        assert loss == pytest.approx(one.rows()[key], rel=1e-5)
        assert moved.rows(rank=1)[key] == loss
