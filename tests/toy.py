"""A data module, a model and a trainer that are small enough for tests; every token follows from the one before."""

from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningDataModule, Trainer, seed_everything
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from kerple.positions import strategies
from kerple.training.language_model import LanguageModel

QUIET: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


class Counting(Dataset[dict[str, Tensor]]):
    """Item i counts upwards from i, modulo the vocabulary: {"tokens": (length + 1,) int64, "index": i}."""

    def __init__(self, vocabulary: int, length: int, size: int) -> None:
        self.vocabulary, self.length, self.size = vocabulary, length, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"tokens": torch.arange(i, i + self.length + 1) % self.vocabulary, "index": torch.tensor(i)}


class ToyData(LightningDataModule):
    """Counting, with the attributes callbacks and the model ask of a data module."""

    def __init__(self, vocabulary: int = 11, length: int = 8, batch_size: int = 4) -> None:
        super().__init__()
        self.vocabulary, self.length, self.batch_size = vocabulary, length, batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Counting(self.vocabulary, self.length, 10_000), self.batch_size)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Counting(self.vocabulary, self.length, 8), self.batch_size)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.blocks("test", self.length), 1)

    def blocks(self, split: str, length: int, limit: int | None = None) -> Counting:
        return Counting(self.vocabulary, length, limit or 4)

    def token_bytes(self) -> Tensor:
        return torch.full((self.vocabulary,), 2)


def trainer(folder: Path, *callbacks: Callback, events: bool = False, **options: Any) -> Trainer:
    """A trainer on the CPU that shows nothing; with `events` it writes TensorBoard's files into the folder."""
    logger = TensorBoardLogger(folder, name="", version="", default_hp_metric=False) if events else False
    return Trainer(default_root_dir=folder, callbacks=list(callbacks), **QUIET | {"logger": logger} | options)


def small_model(position: Any = "KerpleLog", vocabulary: int = 11, **options: Any) -> LanguageModel:
    """A model of one layer, width 16 and two heads, for 8 tokens; the position is a class or its name."""
    seed_everything(0, verbose=False)
    position = strategies()[position] if isinstance(position, str) else position
    return LanguageModel(position, vocabulary, 8, **{"layers": 1, "dim": 16, "heads": 2} | options)
