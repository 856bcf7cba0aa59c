"""A loss or gradient that is no number never reaches the weights."""

from pathlib import Path

import pytest
import torch

from kerple.callbacks.health import Finite
from kerple.errors import UserError
from tests.callbacks.line import Line, fit


# ToyData has batches of 4, so a step of 2 micro-batches takes 8 samples; sample 29 is in step 3, micro-batch 28 .. 31
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("loss", "step 3: the loss of samples 28, 29, 30, 31 is not finite"),
        ("gradient", "step 3: the gradient of samples 24, 25, 26, 27, samples 28, 29, 30, 31 is not finite"),
    ],
)
def test_a_run_stops_before_the_step_and_names_samples_and_checkpoint(kind: str, message: str, tmp_path: Path) -> None:
    model = Line(29, kind)
    last = tmp_path / "checkpoints" / "last.ckpt"
    with pytest.raises(UserError) as raised:
        fit(tmp_path, model, Finite())
    assert message in str(raised.value)
    assert str(last) in str(raised.value)
    assert model.weight.item() == model.seen[-1]
    assert torch.load(last, weights_only=True)["global_step"] == 2


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_skipping_leaves_weights_and_moments_and_counts(kind: str, tmp_path: Path) -> None:
    model, health = Line(29, kind), Finite("skip")
    with pytest.warns(UserWarning, match="step 3: .* left out, 1 so far"):
        trainer = fit(tmp_path, model, health)
    assert trainer.global_step == 6
    assert health.skipped == 1
    assert trainer.logged_metrics["train/skipped_batches"] == 1
    assert len(set(model.seen)) == 5  # six steps from six weights, one of which stayed
    stored = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert stored["optimizer_states"][0]["state"][0]["step"] == 5
    assert stored["callbacks"]["Finite"] == {"skipped": 1}


def test_a_large_gradient_is_no_fault(tmp_path: Path) -> None:
    model = Line(-1, "loss")
    model.weight.data.fill_(1.2e19)  # the loss is finite, the square of its gradient is not
    fit(tmp_path, model, Finite(), accumulate=1)
    assert model.weight.isfinite()


def test_unknown_action() -> None:
    with pytest.raises(ValueError, match="action: got 'ignore', expected 'stop' or 'skip'"):
        Finite("ignore")  # type: ignore[arg-type]
