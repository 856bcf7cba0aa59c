"""A stopped and resumed run equals an uninterrupted run bit for bit: samples, losses, validations and state.

Two processes equal one process up to the order of sums.
"""

import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.disturbed import Fit, assert_same_state, interruption, prepare, same

DOCUMENTS = {"length": 96, "mask_documents": True, "packing": "best_fit", "score_first_targets": False}
MIXTURE = {"mixture": {"{shards}": 0.25, "{shards}[80:]": 0.75}}
DATA: dict[str, dict[str, Any]] = {
    "stream": {},
    "sharded": {},  # of the same data, with the weights divided between the processes
    "stream, sections": {"sections": 4},
    "masked, sections": {"sections": 4, "length": 48, "mask_documents": True},
    "packed, sections": {"sections": 4, **DOCUMENTS},
    "mixture": MIXTURE,
    "packed mixture, sections": {"sections": 4, **DOCUMENTS, **MIXTURE},
    "stage": {"length": 24, "seed": 2},
}
SHARDED = {"strategy": {"class_path": "kerple.training.sharding.ShardedBlocks"}}
SETTINGS: dict[str, dict[str, Any]] = {
    "one epoch": {},
    "epochs": {"data": {"samples": 40}},  # 10 micro-batches per epoch; validations and checkpoints every 6
    "others": {  # an optimiser and a logger by class name, another schedule, and workers that load the data
        "model": {"optimizer": {"class_path": "torch.optim.SGD", "init_args": {"momentum": 0.9}}, "schedule": "wsd"},
        "data": {"workers": 2},
        "trainer": {"logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "."}}},
    },
    "fp64": {"trainer": {"precision": "64-true"}},
    "masked": {"data": {"length": 96, "mask_documents": True}},
    "packed": {"data": DOCUMENTS},
    # 5 epochs of 10 micro-batches, with 1, 2 and 4 micro-batches per step
    "accumulation by epoch": {
        "data": {"samples": 40},
        "trainer": {
            "accumulate_grad_batches": 1,
            "max_steps": 18,
            "callbacks": [
                {"class_path": "GradientAccumulationScheduler", "init_args": {"scheduling": {0: 1, 1: 2, 2: 4}}}
            ],
        },
    },
    "averaged weights": {
        "model": {"schedule": "constant"},
        "data": {"samples": 40},
        "trainer": {
            "max_epochs": 3,
            "callbacks": [
                {"class_path": "StochasticWeightAveraging", "init_args": {"swa_lrs": 0.005, "swa_epoch_start": 1}}
            ],
        },
    },
}


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="session")
def many_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 25 shards of documents with 60 to 120 tokens."""
    return prepare(tmp_path_factory.mktemp("many"), 200, (60, 120), part=5000)


def data_of(mode: str, shards: Path) -> dict[str, Any]:
    """Return the data options of a mode in `DATA`, with the folder of its shards."""
    mixture = {name.format(shards=shards): weight for name, weight in DATA[mode].get("mixture", {}).items()}
    return {"directory": str(shards), **DATA[mode], "mixture": mixture or None}


@pytest.fixture(scope="session")
def undisturbed(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Fit]:
    @cache
    def of(name: str) -> Fit:
        fit = Fit(tmp_path_factory.mktemp("undisturbed") / "fit", shards, **SETTINGS[name])
        assert fit.start() == 0
        return fit

    return of


def assert_same_run(fit: Fit, undisturbed: Fit) -> None:
    assert fit.rows() == undisturbed.rows()
    assert_same_state(fit.checkpoint(), undisturbed.checkpoint())


@pytest.mark.slow
def test_a_run_stopped_in_three_ways_continues_bit_for_bit(shards: Path, tmp_path: Path, undisturbed) -> None:
    fit, whole = Fit(tmp_path / "fit", shards, **SETTINGS["others"]), undisturbed("others")
    assert fit.start(interruption("on_train_batch_start", 8, signal.SIGINT)) == 130  # in the middle of a step
    assert fit.start(interruption("on_before_backward", 7, 0)) == 2  # an exception in the user's code
    assert fit.start(interruption("on_train_batch_start", 6)) == -signal.SIGKILL
    assert fit.start() == 0
    assert_same_run(fit, whole)
    assert [n for kind, n in whole.rows() if kind == "batch"] == list(range(24))
    assert [n for kind, n in whole.rows() if kind == "validation"] == [0, 3, 6, 9, 12]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "stop", "status"),
    [
        ("epochs", interruption("on_train_batch_start", 12), -signal.SIGKILL),  # the first epoch's end is saved
        ("fp64", interruption("on_train_batch_start", 8, signal.SIGINT), 130),
        ("masked", interruption("on_train_batch_start", 9), -signal.SIGKILL),
        ("packed", interruption("on_before_optimizer_step", 8), -signal.SIGKILL),
        ("accumulation by epoch", interruption("on_train_batch_start", 16, signal.SIGINT), 130),
        ("accumulation by epoch", interruption("on_train_batch_start", 23, signal.SIGINT), 130),
        ("averaged weights", interruption("on_train_batch_start", 7, signal.SIGINT), 130),
        ("averaged weights", interruption("on_train_batch_start", 15), -signal.SIGKILL),
        ("one epoch", interruption("on_validation_batch_end", 4), -signal.SIGKILL),  # saved before, not validated
        ("one epoch", interruption("on_before_optimizer_step", 8), -signal.SIGKILL),
        ("one epoch", interruption("on_validation_batch_start", 4, signal.SIGTERM), 143),
        ("one epoch", interruption("on_train_batch_end", 10, signal.SIGUSR1), 138),
        ("one epoch", interruption("on_train_batch_end", 9, signal.SIGHUP), 129),
    ],
)
def test_a_run_stopped_at_any_hook_continues_bit_for_bit(setting, stop, status, shards, tmp_path, undisturbed):
    fit = Fit(tmp_path / "fit", shards, **SETTINGS[setting])
    assert fit.start(stop) == status
    assert fit.start() == 0
    assert_same_run(fit, undisturbed(setting))


# Two processes over gloo


def steps(fit: Fit, processes: int, accumulate: int) -> list[tuple[float, list[list[int]]]]:
    """Mean loss and samples of each optimiser step, in order."""
    by_rank = [[row for (kind, _), row in fit.rows(r).items() if kind == "batch"] for r in range(processes)]
    in_order, size = [row for rows in zip(*by_rank, strict=True) for row in rows], accumulate * processes
    return [
        # Lightning divides the loss of a micro-batch by the number of micro-batches of the step
        (sum(loss for loss, _ in step) / processes, [sample for _, tokens in step for sample in tokens])
        for step in (in_order[first : first + size] for first in range(0, len(in_order), size))
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "processes"), [*((mode, 2) for mode in DATA), ("packed mixture, sections", 1), ("masked, sections", 4)]
)
def test_every_mode_of_reading_continues_bit_for_bit(mode, processes, many_shards, tmp_path):
    data = data_of(mode, many_shards)
    options = {"data": data, "trainer": SHARDED if mode == "sharded" else {}}
    whole, stopped = (Fit(tmp_path / name, many_shards, processes, **options) for name in ("whole", "stopped"))
    if mode == "stage":  # from the weights of a run with another length
        parent = Fit(tmp_path / "parent", many_shards)
        assert parent.start() == 0
        for fit in (whole, stopped):
            fit.config |= {"weights": str(parent.folder / "run"), "trust": "tests"}  # of the callback that records
    assert whole.start() == 0
    assert stopped.start(interruption("on_before_optimizer_step", 5)) == -signal.SIGKILL
    assert stopped.start(interruption("on_train_batch_start", 6, signal.SIGINT, rank=processes - 1)) == 130
    assert stopped.start() == 0
    assert len(whole.rows()) == 29  # 24 micro-batches and 5 validations
    for rank in range(processes):
        assert stopped.rows(rank) == whole.rows(rank)
    assert_same_state(stopped.checkpoint(), whole.checkpoint())
    states = stopped.checkpoint()["random_states"]
    assert len(states) == processes
    assert processes == 1 or not same(states[0]["torch"], states[-1]["torch"])  # dropout differs between ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "batch_size", "mode"),
    [(2, 4, None), (4, 2, None), (2, 4, "mixture"), (4, 2, "packed mixture, sections")],
)
def test_steps_do_not_depend_on_the_number_of_processes(processes, batch_size, mode, shards, many_shards, tmp_path):
    data = data_of(mode, many_shards) if mode else DOCUMENTS
    options = {"model": {"dropout": 0.0}, "data": data, "trainer": {"num_sanity_val_steps": -1}}
    one, more = Fit(tmp_path / "one", shards, **options), Fit(tmp_path / "more", shards, processes, **options)
    more.config["data"]["init_args"]["batch_size"] = batch_size
    more.config["trainer"] |= {"accumulate_grad_batches": 1, "val_check_interval": 3}
    assert one.start() == more.start() == 0
    for (loss, samples), (their_loss, their_samples) in zip(steps(one, 1, 2), steps(more, processes, 1), strict=True):
        # with sections, the samples of a micro-batch are sorted
        assert sorted(samples) == sorted(their_samples) if data.get("sections") else samples == their_samples
        assert loss / 4 == pytest.approx(their_loss / batch_size, rel=1e-5)  # sums over the scored targets of a batch
    for key, values in more.rows().items():
        if key[0] == "validation":
            assert values == pytest.approx(one.rows()[key], rel=1e-5)


@pytest.mark.slow
def test_a_run_resumed_with_two_processes_continues_with_the_next_sample(shards: Path, tmp_path: Path) -> None:
    """After 5 of 8 steps of two micro-batches in one process, two processes have one micro-batch each per step."""
    plain = {"model": {"dropout": 0.0}, "trainer": {"max_steps": 8, "num_sanity_val_steps": -1}}
    one, moved = (Fit(tmp_path / name, shards, **plain) for name in ("one", "moved"))
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
        assert loss == pytest.approx(their_loss, rel=1e-5)  # the sums have another order
    validations = {key: loss for key, loss in moved.rows().items() if key[0] == "validation"}
    assert ("validation", 6) in validations
    for key, loss in validations.items():
        assert loss == pytest.approx(one.rows()[key], rel=1e-5)
        assert moved.rows(rank=1)[key] == loss
