"""A data module small enough for tests of the command line: every token follows from the one before."""

import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


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
