"""A data module of random tokens with everything the callbacks ask of `TokenShards`, in memory."""

import numpy as np
import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

SPLITS = ("train", "validation", "test")


class Blocks(Dataset[dict[str, Tensor | int]]):
    """Disjoint runs of ``length`` targets of a stream (n,)."""

    def __init__(self, stream: Tensor, length: int, limit: int | None) -> None:
        self.stream, self.length = stream, length
        count = (len(stream) - 1) // length
        self.count = count if limit is None else min(count, limit)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Tensor | int]:
        if i >= self.count:
            raise IndexError(i)
        return {"tokens": self.stream[i * self.length : (i + 1) * self.length + 1], "index": i}


class Stream:
    """A stream as a data module gives it."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, count: int) -> np.ndarray:
        return self.tokens[start : start + count].numpy()


class RandomText(LightningDataModule):
    """Splits of ``tokens`` random tokens each."""

    def __init__(
        self, vocabulary: int = 23, length: int = 8, tokens: int = 200, batch_size: int = 4, workers: int = 0
    ) -> None:
        super().__init__()
        self.vocabulary, self.length, self.batch_size, self.workers = vocabulary, length, batch_size, workers
        self.begins = [0]
        self.streams = {
            split: torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(i))
            for i, split in enumerate(SPLITS)
        }

    def blocks(self, split: str, length: int, limit: int | None = None) -> Blocks:
        return Blocks(self.streams[split], length, limit)

    def stream(self, split: str) -> Stream:
        return Stream(self.streams[split])

    def documents(self, split: str) -> list[int]:
        return self.begins

    def token_bytes(self) -> Tensor:
        return torch.arange(self.vocabulary) % 5  # some tokens are no text

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.blocks("train", self.length), self.batch_size, num_workers=self.workers)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.blocks("validation", self.length), self.batch_size, num_workers=self.workers)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.blocks("test", self.length, 1), 1)
