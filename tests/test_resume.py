"""A run that was stopped, however, and resumed is the run that was not: samples, losses, validations, every bit."""

import signal
from pathlib import Path

import pytest

from tests.disturbed import Fit, assert_same_state, interruption, prepare

EPOCHS = {"data": {"samples": 40}}  # 10 micro-batches an epoch: its end is in the middle of everything
SETTINGS = {"one epoch": {}, "epochs": EPOCHS, "workers": {"data": {"workers": 2}}}


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="session")
def undisturbed(shards: Path, tmp_path_factory: pytest.TempPathFactory):
    fits: dict[str, Fit] = {}

    def of(name: str) -> Fit:
        if name not in fits:
            fit = Fit(tmp_path_factory.mktemp("undisturbed") / "fit", shards, **SETTINGS[name])
            assert fit.start() == 0
            fits[name] = fit
        return fits[name]

    return of


def assert_same_run(fit: Fit, undisturbed: Fit) -> None:
    assert fit.rows() == undisturbed.rows()
    assert_same_state(fit.checkpoint(), undisturbed.checkpoint())


def test_the_reference_run_is_one_that_could_go_wrong(undisturbed) -> None:
    rows = undisturbed("one epoch").rows()
    assert [n for kind, n in rows if kind == "batch"] == list(range(24))
    assert [n for kind, n in rows if kind == "validation"] == [0, 3, 6, 9, 12]
    assert undisturbed("workers").rows() == rows


@pytest.mark.slow
def test_an_epoch_has_the_same_samples_again(undisturbed) -> None:
    epochs = undisturbed("epochs").rows()
    assert all(epochs["batch", n][1] == epochs["batch", n % 10][1] for n in range(24))  # the same tokens again
    assert epochs["batch", 0][1] != epochs["batch", 1][1]


@pytest.mark.parametrize(
    ("setting", "stop", "status"),
    [
        ("one epoch", interruption("on_train_batch_start", 14, signal.SIGTERM), 143),  # in the middle of a step
        ("one epoch", interruption("on_before_backward", 21, 0), 1),  # an exception
        ("workers", interruption("on_train_batch_start", 17), -signal.SIGKILL),
        *(
            pytest.param(setting, stop, status, marks=pytest.mark.slow)
            for setting, stop, status in (
                ("epochs", interruption("on_train_batch_start", 12), -signal.SIGKILL),  # the first epoch's end is saved
                # saved before, not validated
                ("one epoch", interruption("on_validation_batch_end", 4), -signal.SIGKILL),
                ("one epoch", interruption("on_before_optimizer_step", 8), -signal.SIGKILL),
                ("one epoch", interruption("on_validation_batch_start", 4, signal.SIGTERM), 143),
                ("one epoch", interruption("on_train_batch_end", 10, signal.SIGUSR1), 138),
            )
        ),
    ],
)
def test_a_stopped_run_continues_in_every_bit(
    setting: str, stop: list, status: int, shards: Path, tmp_path: Path, undisturbed
) -> None:
    fit = Fit(tmp_path / "fit", shards, **SETTINGS[setting])
    assert fit.start(stop) == status
    assert fit.start() == 0
    assert_same_run(fit, undisturbed(setting))


@pytest.mark.slow
def test_a_run_may_be_stopped_again_and_again(shards: Path, tmp_path: Path, undisturbed) -> None:
    fit = Fit(tmp_path / "fit", shards, **EPOCHS)
    stops = 0
    while fit.start(interruption("on_train_batch_end", 9, signal.SIGTERM)) != 0:
        stops += 1
        assert stops < 20
    assert stops >= 2
    assert_same_run(fit, undisturbed("epochs"))
