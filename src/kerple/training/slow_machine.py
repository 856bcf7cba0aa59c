"""`SlowMachine`: a callback that says when other processes slow the training down."""

import os
import time
from statistics import median
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from kerple.training.trainer import print_once

SLOW, HOUR = 60.0, 3600.0  # seconds


class SlowMachine(Callback):
    """Prints a line if the machine is overloaded or the training has become slow, at most once an hour.

    The machine is overloaded if its one-minute load exceeds the number of its cores by more than 1. The training is
    slow if for 60 s each step has had less than half the median tokens per second of steps 10 to 50 of this process.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._rates: list[float] = []  # tokens per second of steps 1 to 50
        self._tokens, self._step, self._began = 0, trainer.global_step, time.monotonic()
        self._slow_since: float | None = None
        self._printed = -HOUR

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: dict[str, Any], batch_idx: int
    ) -> None:
        self._tokens += batch["tokens"][:, 1:].numel() * trainer.world_size
        if trainer.global_step == self._step:  # a micro-batch before the last one of a step
            return
        now = time.monotonic()
        rate = self._tokens / max(now - self._began, 1e-9)
        self._tokens, self._step, self._began = 0, trainer.global_step, now
        if len(self._rates) < 50:
            self._rates.append(rate)
        elif rate >= (usual := median(self._rates[9:])) / 2:
            self._slow_since = None
        else:
            self._slow_since = now if self._slow_since is None else self._slow_since
        if now - self._printed < HOUR:
            return
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        if load > cores + 1:
            cause = f"the machine's load in the last minute was {load:.1f} on {cores} cores"
        elif self._slow_since is not None and now - self._slow_since >= SLOW:
            cause = f"{rate:,.0f} tokens/s, less than half of the {usual:,.0f} of steps 10 to 50, for {SLOW:.0f} s"
        else:
            return
        self._printed = now
        print_once(f"warning: {cause}; other processes slow this fit down: end them, or stop it and continue it later")
