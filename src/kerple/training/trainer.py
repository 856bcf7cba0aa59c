"""`AutoTrainer`: Lightning's Trainer with the defaults and checks of this project."""

from collections.abc import Callable
from functools import partial, reduce
from inspect import unwrap
from itertools import product
from operator import or_
from typing import Any, Literal, cast, get_args

import torch
from jsonargparse import Namespace
from lightning_fabric.connector import _PRECISION_INPUT
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from pytorch_lightning.callbacks.spike import SpikeDetection
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from kerple.base.errors import UserError, require
from kerple.config.auto_precision import EMULATED, SAFE, choose_precision, emulated
from kerple.config.options import listed
from kerple.measure.measure import Measure
from kerple.training.measure_callback import MeasureCallback

SEARCH = "which searches again when a fit continues, so that the fit changes; search in a script, and set"
# callbacks of Lightning with which a fit would fail, or could not be continued
REFUSED: dict[type[Callback], str] = {
    BackboneFinetuning: "which needs a model with the attribute backbone",
    BatchSizeFinder: f"{SEARCH} data.batch_size",
    LearningRateFinder: f"{SEARCH} model.lr",
    ModelPruning: "whose masks the head of this model would not apply",
    SpikeDetection: "whose state Lightning cannot restore when a fit continues",
}


def put_integers_first(function: Callable[..., Any]) -> None:
    """Put int before float in the types of a function's arguments, because a parser tries them in their order.

    ``typing`` may give Lightning's ``Optional[Union[int, float]]`` the order of an equal type of another module. The
    option ``limit_val_batches=1``, one batch, would then be 1.0, all batches. It depends on the order of imports.
    """
    hints = unwrap(function).__annotations__
    for name, hint in hints.items():
        if {int, float} <= set(types := get_args(hint)):
            hints[name] = reduce(or_, (kind for kind in types if kind not in (int, float)), int | float)


for _class in (Trainer, StochasticWeightAveraging):
    put_integers_first(_class.__init__)


class AutoTrainer(Trainer):
    """Lightning's Trainer, which also accepts the precision ``auto``, and measurements as callbacks.

    ``accelerator: auto`` never selects an Apple GPU, because losses are summed in fp64, which Apple GPUs lack.

    Args:
        precision: A precision of Lightning, or ``auto`` for `kerple.config.auto_precision.choose_precision`.
        callbacks: Callbacks and measurements. Each measurement is wrapped in a `MeasureCallback`. A callback that
            averages weights is the last one.

    Raises:
        UserError: If the accelerator is an Apple GPU, ``overfit_batches`` is set, a callback is one of `REFUSED` or
            averages weights in a fit without epochs or in bf16-true, or a number is out of range. Lightning does not
            check these numbers; a negative ``gradient_clip_val``, for example, would reverse the gradient.
    """

    def __init__(
        self,
        *args: Any,
        precision: Literal["auto"] | _PRECISION_INPUT | None = None,
        callbacks: list[Callback | Measure] | Callback | Measure | None = None,
        **kwargs: Any,
    ) -> None:
        accelerator = kwargs.get("accelerator", "auto")
        if torch.backends.mps.is_available() and not torch.cuda.is_available():
            expected = "cpu, because an Apple GPU has no fp64"
            require(accelerator not in ("gpu", "mps"), "trainer.accelerator", accelerator, expected)
            kwargs["accelerator"] = "cpu" if accelerator == "auto" else accelerator
        resolved = choose_precision(kwargs.get("accelerator", "auto"))[0] if precision == "auto" else precision
        for name, lowest in (("gradient_clip_val", 0), ("accumulate_grad_batches", 1)):
            value = kwargs.get(name)
            require(value is None or value >= lowest, f"trainer.{name}", value, f"{lowest} or more")
        for name in ("limit_train_batches", "val_check_interval", "check_val_every_n_epoch"):
            require(kwargs.get(name) != 0, f"trainer.{name}", 0, "a positive number")
        overfit = kwargs.get("overfit_batches")  # Lightning would replace the sampler
        expected = "0; to fit few samples, set data.samples, or data.examples for a task"
        require(not overfit, "trainer.overfit_batches", overfit, expected)
        callbacks = listed(callbacks)
        for callback, (kind, reason) in product(callbacks, REFUSED.items()):
            if isinstance(callback, kind):
                raise UserError(f"trainer.callbacks: got {type(callback).__name__}, {reason}; remove it")
        if any(isinstance(callback, StochasticWeightAveraging) for callback in callbacks):
            expected = "the number of epochs, because StochasticWeightAveraging averages once in an epoch"
            advice = "set it and data.samples, or use EMAWeightAveraging"
            epochs = kwargs.get("max_epochs")
            require(epochs is not None and epochs > 0, "trainer.max_epochs", epochs, f"{expected}; {advice}")
        if resolved == "bf16-true" and any(isinstance(callback, WeightAveraging) for callback in callbacks):
            expected = "bf16-mixed, because each validation would round the averages of WeightAveraging to bf16"
            raise UserError(f"trainer.precision: got {resolved}, expected {expected}")
        wrapped = [MeasureCallback(c) if isinstance(c, Measure) else c for c in callbacks]
        # its hook at the end of a validation restores the weights of the training, so measurements come before it
        wrapped.sort(key=lambda c: isinstance(c, WeightAveraging))
        super().__init__(*args, precision=cast("_PRECISION_INPUT | None", resolved), callbacks=wrapped, **kwargs)

    @property
    def log_dir(self) -> str:
        """The folder of the run, to which results are written; in Lightning, it depends on the logger."""
        return self.strategy.broadcast(self.default_root_dir)


def resolve_auto(trainer: Namespace, resumed: str | None = None) -> None:
    """Replace the precision ``auto`` in the Trainer's options, and print the precision and the reason.

    Args:
        trainer: The Trainer's options, which are changed in place.
        resumed: Precision of the fit that is resumed, which replaces ``auto``; None for a new fit.
    """
    if trainer.precision == "auto":
        choice = (resumed, "the run was started with it") if resumed else choose_precision(trainer.accelerator)
        trainer.precision, reason = choice
        print_once(f"precision {trainer.precision}, because {reason}")
    if emulated(trainer.precision, trainer.accelerator):
        print_once(f"warning: precision {trainer.precision}: {EMULATED}; {SAFE} is faster here")


print_once = rank_zero_only(partial(print, flush=True))
"""Print a line in the first process only."""
