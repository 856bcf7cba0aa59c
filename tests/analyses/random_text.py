"""A data module of random tokens with everything the callbacks ask of `TokenShards`, in memory."""

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.toy import ToyData

SPLITS = ("train", "validation", "test")


class Stream:
    """A stream as a data module gives it."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, count: int) -> np.ndarray:
        return self.tokens[start : start + count].numpy()


class RandomText(ToyData):
    """Splits of ``tokens`` random tokens each."""

    def __init__(self, vocabulary: int = 23, length: int = 8, tokens: int = 200) -> None:
        super().__init__(vocabulary, length)
        self.begins = [0]
        self.streams = {
            split: torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(i))
            for i, split in enumerate(SPLITS)
        }

    def blocks(self, split: str, length: int, limit: int | None = None) -> list[dict[str, Tensor | int]]:
        """Disjoint runs of ``length`` targets."""
        stream = self.streams[split]
        starts = range(0, len(stream) - length, length)[:limit]
        return [{"tokens": stream[start : start + length + 1], "index": i} for i, start in enumerate(starts)]

    def stream(self, split: str) -> Stream:
        return Stream(self.streams[split])

    def documents(self, split: str) -> list[int]:
        return self.begins

    def token_bytes(self) -> Tensor:
        return torch.arange(self.vocabulary) % 5  # some tokens are no text

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.blocks("train", self.length), self.batch_size)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.blocks("validation", self.length), self.batch_size)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.blocks("test", self.length, 1), 1)
