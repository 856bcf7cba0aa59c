"""A model of one weight for tests of callbacks, with samples that make its loss or gradient infinite."""

from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor

from kerple.training.last_checkpoint import LastCheckpoint
from tests.toy import ToyData, trainer


class Line(LightningModule):
    """One weight; the sample `poisoned` has an infinite loss (kind "loss"), or a loss whose gradient alone is."""

    def __init__(self, poisoned: int = -1, kind: str = "loss", fused: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(1.0))
        self.poisoned, self.kind, self.fused = poisoned, kind, fused
        self.seen: list[float] = []

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        self.seen.append(self.weight.item())
        bad = (batch["index"] == self.poisoned).any()
        if bad and self.kind == "loss":
            return self.weight * torch.inf
        if bad:
            return torch.sqrt(self.weight - self.weight.detach())  # 0, with an infinite slope
        return self.weight**2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1, fused=self.fused)


def fit(folder: Path, model: Line, *callbacks: Callback, accumulate: int = 2, **options: Any) -> Trainer:
    """Six steps, with a checkpoint after every second one."""
    steps = {"max_steps": 6, "accumulate_grad_batches": accumulate, "limit_val_batches": 0}
    run = trainer(folder, *callbacks, LastCheckpoint(every_n_train_steps=2), **steps | options)
    run.fit(model, ToyData())
    return run
