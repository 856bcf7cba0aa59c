"""A loss or gradient that is not finite never changes the weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kerple.base.errors import UserError
from kerple.training.non_finite_guard import NonFiniteGuard
from tests.toy import Line, fit


def last(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)


# ToyData has batches of 4, so a step of 2 micro-batches takes 8 samples; sample 29 is in step 3
@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_run_stops_before_the_step_and_names_it_and_the_checkpoint(kind: str, tmp_path: Path) -> None:
    model = Line(29, kind)
    with pytest.raises(UserError) as raised:
        fit(tmp_path, model, NonFiniteGuard())
    assert "step 3: the loss or a gradient is not finite" in str(raised.value)
    assert str(tmp_path / "checkpoints" / "last.ckpt") in str(raised.value)
    assert model.weight.item() == model.seen[-1]
    assert last(tmp_path)["global_step"] == 2


# a step just before a checkpoint, a step just after it, the last step
@pytest.mark.parametrize("step", [1, 2, 5])
def test_weights_that_are_not_finite_end_the_run(step: int, tmp_path: Path) -> None:
    class Broken(Line):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)
            if self.trainer.fit_loop.epoch_loop.batch_idx == step:
                self.weight.data.fill_(torch.nan)

    with pytest.raises(UserError, match=f"step {step + 1}: weights are not finite") as raised:
        fit(tmp_path, Broken(), NonFiniteGuard(), accumulate=1)
    path = tmp_path / "checkpoints" / "last.ckpt"
    assert path.exists() == (step > 1)
    if path.exists():
        assert last(tmp_path)["state_dict"]["weight"].isfinite()
        assert str(path) in str(raised.value)


def test_large_finite_gradients_are_accepted(tmp_path: Path) -> None:
    class Wide(Line):
        def training_step(self, batch: dict, index: int) -> torch.Tensor:
            return self.weight.square().sum()

    model = Wide()
    model.weight = torch.nn.Parameter(torch.full((2,), 1.2e19))  # the loss is finite, the gradient's 2-norm is not
    fit(tmp_path, model, NonFiniteGuard(), accumulate=1)
    assert model.weight.isfinite().all()


class OnOne(Line):
    """Model with an infinite loss and a finite gradient in step 3, only on the second process."""

    def training_step(self, batch: dict, index: int) -> torch.Tensor:
        bad = self.trainer.global_rank == 1 and self.trainer.global_step == 2
        return self.weight**2 + (torch.inf if bad else 0.0)


def test_a_bad_loss_in_one_process_stops_all(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="step 2: the loss or a gradient is not finite"):
        fit(tmp_path, OnOne(), NonFiniteGuard(), accumulate=1, devices=2, strategy="ddp_fork")
    assert last(tmp_path)["global_step"] == 2


# sample 17 is in step 2; the checkpoint after step 3 makes the host check before step 5
@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_steps_between_a_bad_step_and_the_check_do_not_change_weights(kind: str, tmp_path: Path) -> None:
    model = Line(17, kind, fused=True)
    with pytest.raises(UserError, match="step 2: the loss or a gradient"):
        fit(tmp_path, model, NonFiniteGuard(every_n_steps=5))
    assert len(model.seen) == 2 * 4  # micro-batches of two good steps, the bad step, and one more before the check
    assert len(set(model.seen[4:])) == 1
    assert model.weight.item() == model.seen[4]
    assert last(tmp_path)["global_step"] == 2
