"""Data modules in memory, models and a trainer that are small enough for tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader

from kerple.data.evaluation_text import Text, TextBlocks
from kerple.measure.measure import Measure
from kerple.positions import strategies
from kerple.training.language_model import LanguageModel
from kerple.training.last_checkpoint import LastCheckpoint
from kerple.training.trainer import AutoTrainer

QUIET: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


class ToyData(LightningDataModule):
    """Text that counts upwards modulo the vocabulary, with the attributes that callbacks and the model use."""

    begins: Sequence[int] | None = None  # indices of the first tokens of documents
    table: pd.DataFrame | None = None

    def __init__(self, vocabulary: int = 11, length: int = 8, batch_size: int = 4) -> None:
        super().__init__()
        self.vocabulary, self.length, self.batch_size = vocabulary, length, batch_size
        self.streams = dict.fromkeys(("train", "validation", "test"), torch.arange(80_001) % vocabulary)

    def text(self, split: str) -> Text:
        text = Text(self.streams[split], self.begins, name=f"the {split} split")
        text.split, text.token_bytes, text.table = split, self.token_bytes, self.table
        return text

    @property
    def token_bytes(self) -> Tensor:
        return torch.full((self.vocabulary,), 2)

    def blocks(self, split: str, length: int, limit: int | None = None) -> TextBlocks:
        return self.text(split).blocks(length, limit, fewer=True)

    def loader(self, blocks: TextBlocks, batch_size: int) -> DataLoader:
        return DataLoader([{"tokens": block, "index": i} for i, block in enumerate(blocks)], batch_size)

    def train_dataloader(self) -> DataLoader:
        return self.loader(self.blocks("train", self.length), self.batch_size)

    def val_dataloader(self) -> DataLoader:
        return self.loader(self.blocks("validation", self.length, 8), self.batch_size)

    def test_dataloader(self) -> DataLoader:
        return self.loader(self.blocks("test", self.length, 4), 1)


class RandomText(ToyData):
    """Splits of random tokens, divided into documents."""

    begins = (0,)

    def __init__(self, vocabulary: int = 23, length: int = 8, tokens: int = 200) -> None:
        super().__init__(vocabulary, length)
        for seed, split in enumerate(self.streams):
            self.streams[split] = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(seed))

    @property
    def token_bytes(self) -> Tensor:
        return torch.arange(self.vocabulary) % 5  # some tokens have no text


def trainer(folder: Path, *callbacks: Callback | Measure, events: bool = False, **options: Any) -> Trainer:
    """Return a trainer on the CPU without output. If `events` is true, it writes TensorBoard files into the folder."""
    logger = TensorBoardLogger(folder, name="", version="", default_hp_metric=False) if events else False
    return AutoTrainer(default_root_dir=folder, callbacks=list(callbacks), **QUIET | {"logger": logger} | options)


def small_model(position: Any = "KerpleLog", vocabulary: int = 11, **options: Any) -> LanguageModel:
    """Return a model of one layer, width 16, two heads and training length 8. `position` is a strategy or its name."""
    seed_everything(0, verbose=False)
    position = strategies()[position] if isinstance(position, str) else position
    return LanguageModel(position, vocabulary, 8, **{"layers": 1, "dim": 16, "heads": 2} | options)


def entries(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path (keys and indices) of every entry of nested mappings and lists."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(p for key, child in children for p in entries(child, (*path, key)))]


class Line(LightningModule):
    """Model with one weight. Sample `poisoned` has an infinite loss (`kind` loss) or gradient (any other `kind`)."""

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
            return torch.sqrt(self.weight - self.weight.detach())  # 0, with an infinite gradient
        return self.weight**2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1, fused=self.fused)


def fit(folder: Path, model: Line, *callbacks: Callback, accumulate: int = 2, **options: Any) -> Trainer:
    """Train for six steps, with a checkpoint after every second step."""
    steps = {"max_steps": 6, "accumulate_grad_batches": accumulate, "limit_val_batches": 0}
    run = trainer(folder, *callbacks, LastCheckpoint(every_n_train_steps=2), **steps | options)
    run.fit(model, ToyData())
    return run
