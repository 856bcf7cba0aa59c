"""Datasets of batches of examples of a task, of which each rank has its own; for text and loaders: `data.loader`."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.utils.data import Dataset

from kerple.model import Batch
from kerple.tasks.base import Example
from kerple.tasks.vocabulary import PAD_ID


def collate(examples: Sequence[Example]) -> Batch:
    """Make a batch of examples, padded on the right.

    Args:
        examples: One or more examples of a task.

    Returns:
        ``tokens`` (B, T + 1) int64, ``scored`` (B, T) bool, ``sizes`` (B, axes) int64.
    """
    ids = [example.tokens() for example in examples]
    longest = max(map(len, ids))
    tokens = np.full((len(ids), longest), PAD_ID, dtype=np.int64)
    scored = np.zeros((len(ids), longest - 1), dtype=bool)
    for row, (example, own) in enumerate(zip(examples, ids, strict=True)):
        tokens[row, : len(own)] = own
        scored[row, : len(own) - 1] = example.scored()
    sizes = torch.tensor([example.sizes for example in examples])
    return {"tokens": torch.from_numpy(tokens), "scored": torch.from_numpy(scored), "sizes": sizes}


class TrainBatches(Dataset[Batch]):
    """Dataset of training batches. Item b of rank r of W has the samples (b · W + r) · batch_size and those after it.

    Args:
        sample: Function from the number of a sample to its example.
        batch_size: Rows of a batch.
        examples: Number of different samples, after which they are repeated in another order; None for no repetition.
        seed: Chooses those orders.
        batches: Batches of each rank in an epoch.
        rank: Number of this process, r.
        world: Number of processes, W.
    """

    def __init__(
        self,
        sample: Callable[[int], Example],
        batch_size: int,
        examples: int | None,
        seed: int,
        batches: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.sample, self.batch_size, self.examples, self.seed = sample, batch_size, examples, seed
        self.batches, self.rank, self.world = batches, rank, world
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, batch: int) -> Batch:
        first = (batch * self.world + self.rank) * self.batch_size
        return collate([self.sample(self._number(k)) for k in range(first, first + self.batch_size)])

    def _number(self, k: int) -> int:
        if self.examples is None:
            return k
        epoch, place = divmod(k, self.examples)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(self.examples)
        return int(self._order[place])


class HeldOutBatches(Dataset[Batch]):
    """Dataset of batches of fixed examples, each of one length. Every rank gets the same number of batches.

    Beside the entries of `collate`, a batch has an ``index`` (B,) int64 with the numbers of its examples, counted over
    all groups. If the batches do not suffice for all ranks, the last ones are fillers of one row, of index -1 and not
    scored.

    Args:
        groups: Groups of examples of one length; no batch has examples of two groups.
        batch_size: Rows of a batch.
        rank: Number of this process, r.
        world: Number of processes, W; item b of rank r is batch b · W + r.
    """

    def __init__(self, groups: Sequence[Sequence[Example]], batch_size: int, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world = rank, world
        self.chunks = [group[i : i + batch_size] for group in groups for i in range(0, len(group), batch_size)]
        self.starts = np.cumsum([0, *map(len, self.chunks)]).tolist()

    def __len__(self) -> int:
        return math.ceil(len(self.chunks) / self.world)

    def __getitem__(self, item: int) -> Batch:
        batch = item * self.world + self.rank
        if batch >= len(self.chunks):
            filler = collate(self.chunks[0][:1])
            return filler | {"scored": filler["scored"] & False, "index": torch.tensor([-1])}
        start, chunk = self.starts[batch], self.chunks[batch]
        return collate(chunk) | {"index": torch.arange(start, start + len(chunk))}
