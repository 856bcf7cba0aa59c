"""Check of the training state in a checkpoint (optimiser, scheduler, loops) against the run that resumes from it.

`kerple.cli.agreement` compares the options of the same checkpoint with those of the run.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pytorch_lightning.trainer.connectors.checkpoint_connector import _CheckpointConnector
from torch import Tensor
from torch.optim import Optimizer

from kerple.base.errors import UserError


class Resumption(_CheckpointConnector):
    """Lightning's connector for checkpoints, which raises a UserError if a state has another shape or type.

    A checksum shows damage, but not what somebody has changed and sealed again. Lightning would use such a state as it
    is, and fail with a traceback later.
    """

    def _restore_modules_and_callbacks(self, *arguments: Any, **options: Any) -> None:
        with self._one_line():
            super()._restore_modules_and_callbacks(*arguments, **options)

    def restore_training_state(self) -> None:
        if not self._loaded_checkpoint:
            return
        loaded, trainer = self._loaded_checkpoint, self.trainer
        with self._one_line():
            if trainer.training:
                loops: dict[str, Any] = {"loops": {"fit_loop": trainer.fit_loop.state_dict()}}
                loops |= {"lr_schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs]}
                _hold("", {key: loaded[key] for key in loops}, loops)
                if trainer.strategy.lightning_restore_optimizer:  # else the states are in shards
                    _hold_optimisers(loaded["optimizer_states"], trainer.optimizers)
            super().restore_training_state()

    @contextmanager
    def _one_line(self) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0][:200]
            raise UserError(
                f"ckpt_path: {self._ckpt_path}: got a state that cannot be taken up ({type(error).__name__}: {reason})"
                ", expected that of a run of `fit` with these options; take another checkpoint"
            ) from error


def _hold_optimisers(states: Any, optimisers: list[Optimizer]) -> None:
    """Check that moments have the shapes of the parameters, and options the types of the optimisers' own."""
    if not isinstance(states, list) or len(states) != len(optimisers):
        raise TypeError(f"optimizer_states is no list of {len(optimisers)}")
    for state, optimiser in zip(states, optimisers, strict=True):
        fresh = optimiser.state_dict()
        _hold("optimizer_states.param_groups", state["param_groups"], fresh["param_groups"])
        parameters = [p for group in optimiser.param_groups for p in group["params"]]
        for number, moments in state["state"].items():
            for name, moment in moments.items():
                if not isinstance(moment, Tensor) or (moment.numel() != 1 and moment.shape != parameters[number].shape):
                    raise TypeError(f"optimizer_states.{number}.{name} is not of its parameter's shape")


def _hold(where: str, given: Any, fresh: Any) -> None:
    """Check that a state has containers and numbers where a new state has them; old states may lack some."""
    kind = type(fresh)
    if isinstance(fresh, dict):
        sound = isinstance(given, dict)
        for key in fresh.keys() & (given.keys() if sound else ()):
            _hold(f"{where}.{key}".lstrip("."), given[key], fresh[key])
    elif isinstance(fresh, list | tuple):
        sound = isinstance(given, list | tuple) and (len(given) == len(fresh) or not fresh)
        for one, other in zip(given if sound else (), fresh, strict=False):
            _hold(where, one, other)
    elif isinstance(fresh, bool):
        sound = isinstance(given, bool)
    elif isinstance(fresh, int | float):
        sound = isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given) and given >= 0
        sound = sound and (isinstance(given, int) or isinstance(fresh, float))
    else:
        sound = fresh is None or isinstance(given, kind)
    if not sound:
        raise TypeError(f"{where} is {str(given)[:50]!r}, not as {str(fresh)[:50]!r}")
