"""`Throughput`: a callback that measures the speed and memory of training."""

import json
import os
import platform
import re
import resource
import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from pytorch_lightning import Callback, LightningModule, Trainer

from kerple.attention.backend_selection import backends_used
from kerple.base.atomic import write
from kerple.positions import Position
from kerple.training.provenance import git
from kerple.training.trainer_access import log_directory, untyped


class Throughput(Callback):
    """Logs ``train/tokens_per_second`` and ``train/peak_memory_mib``, and writes ``cost.json`` at the end of `fit`.

    A rate is the number of targets on all devices in ``trainer.log_every_n_steps`` optimiser steps, divided by the
    seconds of these steps. This time includes waiting for data and excludes validation.

    ``cost.json`` contains the median rate, the seconds of torch.compile in this process, the peak memory, the numbers
    of parameters and steps, the backends of attention, and the environment. The median leaves out the first rate after
    each start or resumption, because the first step allocates and compiles. Peak memory is the largest total size of
    the tensors on a CUDA device, or the largest resident size of the process on a CPU. Checkpoints contain the rates
    and the peak memory, so that a resumed run includes them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []
        self.peak = 0
        self._intervals: int | None = None  # number of measured intervals in this process; None before training

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._intervals = 0
        backends_used.clear()
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)
        self._begin_interval(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._paused = _now(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._intervals is not None:  # not the sanity check
            self._interval_start += _now(pl_module) - self._paused

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: dict[str, Any], batch_idx: int
    ) -> None:
        assert self._intervals is not None
        self._tokens += batch["tokens"][:, 1:].numel() * trainer.world_size  # all tokens but the first are targets
        if trainer.global_step - self._step < untyped(trainer).log_every_n_steps:
            return
        rate = self._tokens / (_now(pl_module) - self._interval_start)
        if self._intervals:
            self.rates.append(rate)
        self._intervals += 1
        self._update_peak(pl_module)
        pl_module.log("train/tokens_per_second", rate, prog_bar=True)
        pl_module.log("train/peak_memory_mib", self.peak / 2**20)
        self._begin_interval(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._update_peak(pl_module)  # before the last checkpoint

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        path = log_directory(trainer) / "cost.json"
        if not trainer.is_global_zero or (path.exists() and self._intervals is None):
            return  # a finished run was resumed, so this process has not trained and the existing cost.json is kept
        from torch._dynamo.utils import calculate_time_spent  # slow, unless torch.optim has imported it already

        cost = {
            "tokens_per_second": median(self.rates) if self.rates else None,
            "compilation_seconds": calculate_time_spent()["total_wall_time"],
            "peak_memory_bytes": self.peak,
            "parameters": sum(p.numel() for p in pl_module.parameters()),
            "position_parameters": count_position_parameters(pl_module),
            "steps": trainer.global_step,
            "attention": [asdict(backend) for backend in backends_used],
            "environment": environment(trainer, pl_module.device),
        }
        write(path, json.dumps(cost, indent=1) + "\n")

    def state_dict(self) -> dict[str, Any]:
        return {"rates": self.rates, "peak": self.peak}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rates, self.peak = list(state_dict["rates"]), state_dict["peak"]

    def _update_peak(self, pl_module: LightningModule) -> None:
        self.peak = max(self.peak, peak_memory(pl_module.device))

    def _begin_interval(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._tokens, self._step, self._interval_start = 0, trainer.global_step, _now(pl_module)


def count_position_parameters(module: torch.nn.Module) -> int:
    """Count the parameters of all positional strategies in a model. A strategy that layers share counts once."""
    parameters = {p for m in module.modules() if isinstance(m, Position) for p in m.parameters()}
    return sum(p.numel() for p in parameters)


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: of all tensors on a CUDA device, or of this process for other devices."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def environment(trainer: Trainer, device: torch.device) -> dict[str, str]:
    """Return versions, commit, machine, devices and precision, as reports show them. Unknown values are left out."""
    facts = {
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "pytorch-lightning", "torchmetrics")},
        "commit": git("describe", "--always", "--abbrev=12", "--dirty=+").strip(),  # ends in + if files were changed
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": f"{os.cpu_count()}, {torch.get_num_threads()} threads",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else "none",
        "devices": str(trainer.world_size),
        "precision": str(trainer.precision),
    }
    return {key: value for key, value in facts.items() if value}


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    name = re.search(r"^model name\s*: (.*)", path.read_text("utf-8", "replace") if path.exists() else "", re.MULTILINE)
    return name[1].strip() if name else platform.processor()


def _now(pl_module: LightningModule) -> float:
    if pl_module.device.type == "cuda":
        torch.cuda.synchronize(pl_module.device)
    return time.perf_counter()
