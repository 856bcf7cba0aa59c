"""Random problems. Sample k depends only on seed, split and k, for any number of ranks and workers.

No test problem occurs in training:

- Up to the training length, a hash of the problem assigns it to training, validation or test. Problems are drawn until
  one belongs to the requested split.
- Longer problems do not occur in training.

The hash does not depend on the seed, so that all runs of a comparison hold out the same problems.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Literal, get_args

import numpy as np
import torch
from torch.utils.data import Dataset

from kerple.base.errors import UserError
from kerple.model import Batch
from kerple.tasks.task import Example, Task
from kerple.tasks.vocabulary import PAD_ID

Split = Literal["train", "validation", "test"]
MAX_DRAWS = 1000  # draws after which a split counts as empty
STALE = 200  # draws without a new problem after which a length counts as exhausted


@dataclass(frozen=True)
class Sampler:
    """Draws problems of a task.

    Args:
        task: The task.
        train_length: Largest length of training problems.
        held_out: Fraction of the problems of training lengths in the test split. The validation split has the same
            fraction.
    """

    task: Task
    train_length: int
    held_out: float

    def split_of(self, example: Example) -> Split:
        """Return the split of a problem that is not longer than the training length."""
        number = int.from_bytes(blake2b(example.identity.encode(), digest_size=8).digest(), "big") / 2**64
        return "test" if number < self.held_out else "validation" if number < 2 * self.held_out else "train"

    def draw(self, split: Split, seed: int, index: int, length: int | None = None) -> Example | None:
        """Draw sample number ``index`` of a split.

        Args:
            split: ``train``, ``validation`` or ``test``.
            seed: Seed of the samples, 0 to 2⁶⁴ - 1.
            index: Index of the sample, from 0.
            length: Length of the problem; None for a random length, uniform on 1..train_length.

        Returns:
            The example, or None if the split has almost no problems of this length.
        """
        stream = np.random.Philox(key=[seed, index], counter=[0, 0, length or 0, get_args(Split).index(split)])
        rng = np.random.Generator(stream)
        if length is None:
            length = int(rng.integers(1, self.train_length + 1))
        for _ in range(MAX_DRAWS):
            example = self.task.example(length, rng)
            if (split == "test" and length > self.train_length) or self.split_of(example) == split:
                return example
        return None

    def training_problem(self, seed: int, index: int, length: int | None = None) -> Example:
        """Return training problem number ``index``, see `draw`.

        Raises:
            UserError: If there is no training problem.
        """
        example = self.draw("train", seed, index, length)
        if example is None:
            raise UserError(f"data.held_out: got {self.held_out}, which leaves no training problem; reduce it")
        return example

    def distinct(self, split: Split, count: int, length: int | None = None) -> list[Example]:
        """Draw ``count`` different problems of a split, or fewer if the split has fewer.

        The seed is always 0, so that all runs are tested on the same problems.
        """
        examples: dict[str, Example] = {}
        index = last = 0  # index of this draw, and of the last draw with a new problem
        while len(examples) < count and index - last <= STALE:
            example = self.draw(split, 0, index, length)
            if example is None and length is not None:
                break
            if example is not None and example.prompt not in examples:
                examples[example.prompt] = example
                last = index
            index += 1
        return list(examples.values())


def collate(examples: Sequence[Example]) -> Batch:
    """Return a batch of examples, padded on the right.

    Returns:
        ``tokens`` (B, T + 1) int64 and ``scored`` (B, T) bool.
    """
    sequences = [example.tokens() for example in examples]
    longest = max(map(len, sequences))
    tokens = torch.full((len(examples), longest), PAD_ID)  # (B, T + 1)
    scored = torch.zeros(len(examples), longest - 1, dtype=torch.bool)  # (B, T)
    for row, (example, sequence) in enumerate(zip(examples, sequences, strict=True)):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
        scored[row, : len(sequence) - 1] = torch.tensor(example.scored())
    return {"tokens": tokens, "scored": scored}


@lru_cache(maxsize=1)  # of the current epoch
def _order(seed: int, epoch: int, examples: int) -> np.ndarray:
    """Return the order of repeated problems in an epoch."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(examples)


class TrainingProblems(Dataset[Batch]):
    """Dataset of training batches. Item b of rank r of W starts with sample (b · W + r) · batch_size.

    Args:
        sampler: Sampler of the problems.
        seed: Seed of the problems, and of their order if they are repeated.
        batch_size: Number of rows of a batch.
        examples: Number of different samples, which are then repeated in another order; None for no repetition.
        batches: Number of batches of each rank in an epoch.
        rank: Index of this process, r.
        world: Number of processes, W.
    """

    def __init__(
        self, sampler: Sampler, seed: int, batch_size: int, examples: int | None, batches: int, rank: int, world: int
    ) -> None:
        self.sampler, self.seed, self.batch_size, self.examples = sampler, seed, batch_size, examples
        self.batches, self.rank, self.world = batches, rank, world

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, batch: int) -> Batch:
        first = (batch * self.world + self.rank) * self.batch_size
        numbers = range(first, first + self.batch_size)
        return collate([self.sampler.training_problem(self.seed, self._problem(k)) for k in numbers])

    def _problem(self, k: int) -> int:
        """Return the index of the problem of the k-th sample."""
        if self.examples is None:
            return k
        epoch, i = divmod(k, self.examples)
        return int(_order(self.seed, epoch, self.examples)[i])


@dataclass(frozen=True)
class Examples:
    """Examples of a task for measurements.

    Args:
        task: The task.
        groups: Groups of examples with equal length.
        batch_size: Number of examples per forward pass.
        training_length: Largest length of training problems.
        lengths: Requested lengths, some of which may have no example.
    """

    task: Task
    groups: Sequence[Sequence[Example]]
    batch_size: int
    training_length: int
    lengths: Sequence[int]


class HeldOutProblems(Dataset[Batch]):
    """Dataset of batches of fixed examples with equal length. Every rank gets the same number of batches.

    A batch contains the entries of `collate`, and ``index`` (B,) int64, the indices of its examples in all groups. If
    there are too few batches for all ranks, the missing batches have one row with index -1, which is not scored.

    Args:
        groups: Groups of examples with equal length. No batch has examples of two groups.
        batch_size: Number of rows of a batch.
        rank: Index of this process, r.
        world: Number of processes, W; item b of rank r is batch b · W + r.
    """

    def __init__(self, groups: Sequence[Sequence[Example]], batch_size: int, rank: int, world: int) -> None:
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
