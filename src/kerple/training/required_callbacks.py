"""`callback_options`: the user's callbacks, and those that every fit, test or validation needs."""

import sys
from typing import Any

from jsonargparse import Namespace
from pytorch_lightning.callbacks import (
    DeviceStatsMonitor,
    LearningRateMonitor,
    ModelCheckpoint,
    ProgressBar,
    TQDMProgressBar,
)

from kerple.config.options import listed
from kerple.training.last_checkpoint import LastCheckpoint
from kerple.training.non_finite_guard import NonFiniteGuard
from kerple.training.progress_lines import ProgressLines
from kerple.training.provenance import Provenance
from kerple.training.random_state import RandomState
from kerple.training.slow_machine import SlowMachine

LOGGER_ONLY = (LearningRateMonitor, DeviceStatsMonitor)


def callback_options(command: str, trainer: Namespace) -> dict[str, Any]:
    """Return the options ``callbacks`` and ``enable_progress_bar`` of a Trainer.

    Args:
        command: ``fit``, ``test`` or ``validate``.
        trainer: The user's options of the Trainer, with callbacks as objects.
    """
    callbacks, bar = listed(trainer.callbacks), trainer.enable_progress_bar
    if trainer.logger is False:  # with which Lightning refuses callbacks that only log
        callbacks = [callback for callback in callbacks if not isinstance(callback, LOGGER_ONLY)]
    if command == "fit":
        required = [RandomState, NonFiniteGuard, Provenance, SlowMachine]
        required += [] if trainer.enable_checkpointing is False else [LastCheckpoint]
        callbacks = callbacks + [kind() for kind in required if not any(isinstance(c, kind) for c in callbacks)]
    if command == "fit" and trainer.fast_dev_run:  # Lightning's writes a last checkpoint even so
        callbacks = [callback for callback in callbacks if not isinstance(callback, ModelCheckpoint)]
    others = [callback for callback in callbacks if not isinstance(callback, ProgressBar)]
    # output to a file cannot show a bar, and in a test Lightning's bar does not count the blocks of text
    if bar is not False and (command == "test" or not sys.stdout.isatty()):
        lines = [] if any(isinstance(callback, ProgressLines) for callback in others) else [ProgressLines()]
        return {"callbacks": others + lines, "enable_progress_bar": False}
    if bar is not False and command == "fit" and callbacks == others:
        # each update of the bar waits for the GPU
        callbacks = [*callbacks, TQDMProgressBar(refresh_rate=trainer.log_every_n_steps or 50)]
    return {"callbacks": callbacks, "enable_progress_bar": bar}
