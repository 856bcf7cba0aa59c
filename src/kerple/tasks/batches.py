"""Examples as batches, and the order in which ranks and workers make them."""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from kerple.tasks.base import Example
from kerple.tasks.vocabulary import PAD_ID

Batch = dict[str, Tensor]


def collate(examples: Sequence[Example]) -> Batch:
    """Pad examples on the right.

    Args:
        examples: At least one, all of one task.

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
    """Batch number b over all ranks: samples b · batch_size and following.

    Args:
        sample: The example of a sample number.
        batch_size: Rows of a batch.
        examples: Number of different samples; then they come again, in another order each time. None: never.
        seed: Of those orders.
    """

    def __init__(self, sample: Callable[[int], Example], batch_size: int, examples: int | None, seed: int) -> None:
        self.sample, self.batch_size, self.examples, self.seed = sample, batch_size, examples, seed
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def __getitem__(self, batch: int) -> Batch:
        first = batch * self.batch_size
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
    """Fixed examples in batches of one length each, every rank the same number.

    A batch has an ``index`` (B,) int64 beside what `collate` gives: 0, 1, … over all examples. It is -1 in the fillers
    with which short ranks end; no target of theirs is scored.

    Args:
        groups: Examples of one length each; batches do not mix them.
        batch_size: Rows of a batch.
        world: Number of ranks; batch number b is for rank b mod world.
    """

    def __init__(self, groups: Sequence[Sequence[Example]], batch_size: int, world: int) -> None:
        self.chunks = [group[i : i + batch_size] for group in groups for i in range(0, len(group), batch_size)]
        self.starts = np.cumsum([0, *map(len, self.chunks)]).tolist()
        self.length = math.ceil(len(self.chunks) / world) * world

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, batch: int) -> Batch:
        if batch >= len(self.chunks):
            filler = collate(self.chunks[0][:1])
            return filler | {"scored": filler["scored"] & False, "index": torch.tensor([-1])}
        start, chunk = self.starts[batch], self.chunks[batch]
        return collate(chunk) | {"index": torch.arange(start, start + len(chunk))}


class RankOrder(DistributedSampler[int]):
    """Batch numbers of one rank, in order, from a point where an interrupted run goes on.

    A DistributedSampler by type only: Lightning leaves those as they are and would replace any other on several
    devices.

    Args:
        batches: Of this rank.
        rank: Of this process.
        world: Number of processes.
        start: Batches of this rank already done.
    """

    def __init__(self, batches: int, rank: int = 0, world: int = 1, start: int = 0) -> None:
        self.batches, self.rank, self.world, self.start = batches, rank, world, start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start * self.world + self.rank, self.batches * self.world, self.world))

    def __len__(self) -> int:
        return self.batches

    def set_epoch(self, epoch: int) -> None:
        """Nothing: the order does not depend on the epoch."""
