"""A model of one weight for tests of callbacks, with samples that make its loss or gradient infinite."""

from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor

from kerple.training.last_checkpoint import LastCheckpoint
from tests.toy import ToyData


class Line(LightningModule):
    """One weight; samples `poisoned` have an infinite loss (`loss`), or a loss whose gradient alone is (`gradient`)."""

    def __init__(self, poisoned: int, kind: str) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(1.0))
        self.poisoned, self.kind = poisoned, kind
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
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def fit(folder: Path, model: Line, *callbacks: Callback, accumulate: int = 2, **options: Any) -> Trainer:
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_steps=6,
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[*callbacks, LastCheckpoint(every_n_train_steps=2)],
        **options,
    )
    trainer.fit(model, ToyData())
    return trainer
