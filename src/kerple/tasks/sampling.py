"""Random problems of a task. Problem k of a split depends only on the seed and k, not on ranks and workers.

No test problem occurs in training:

- A problem that is not longer than the training length is assigned to training, validation or test by a hash. To
  draw a problem of a split, `Sampler` draws random problems until one belongs to the split.
- Longer problems do not occur in training.

The hash does not depend on the seed, so that all runs of a comparison hold out the same problems.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Literal, get_args

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from kerple.base.errors import UserError
from kerple.model import Batch
from kerple.tasks.task import Example, Task
from kerple.tasks.vocabulary import PAD_ID

Split = Literal["train", "validation", "test"]
MAX_DRAWS = 1000  # largest number of random problems that one call of `draw` tries to find one of the split
STALE = 200  # number of consecutive calls of `draw` without a new problem after which `distinct` stops


@dataclass(frozen=True)
class Sampler:
    """Draws problems of a task.

    Args:
        task: The task.
        train_length: Largest length of training problems.
        held_out: Fraction of the problems up to ``train_length`` that belong to the test split. The validation split
            has the same fraction.
    """

    task: Task
    train_length: int
    held_out: float

    def split_of(self, example: Example) -> Split:
        """Return the split of a problem, which must not be longer than the training length."""
        number = int.from_bytes(blake2b(example.identity.encode(), digest_size=8).digest(), "big") / 2**64
        return "test" if number < self.held_out else "validation" if number < 2 * self.held_out else "train"

    def draw(self, split: Split, seed: int, index: int, length: int | None = None) -> Example | None:
        """Draw problem number ``index`` of a split.

        Args:
            split: ``train``, ``validation`` or ``test``.
            seed: Seed of the problems, 0 to 2⁶⁴ - 1.
            index: Index of the problem, from 0.
            length: Length of the problem; None for a random length, uniform on 1..train_length.

        Returns:
            The problem and its answer, or None if none of `MAX_DRAWS` random problems belongs to the split.
        """
        counter = [0, 0, length or 0, get_args(Split).index(split)]
        key = np.array([seed, index], np.uint64)  # numpy would round large numbers in a list to float64
        rng = np.random.Generator(np.random.Philox(key=key, counter=counter))
        if length is None:
            length = int(rng.integers(1, self.train_length + 1))
        for _ in range(MAX_DRAWS):
            example = self.task.example(length, rng)
            if (split == "test" and length > self.train_length) or self.split_of(example) == split:
                return example
        return None

    def training_problem(self, seed: int, index: int, length: int | None = None) -> Example:
        """Return training problem number ``index``. The arguments are those of `draw`.

        Raises:
            UserError: None of `MAX_DRAWS` random problems is a training problem.
        """
        example = self.draw("train", seed, index, length)
        if example is None:
            raise UserError(f"data.held_out: got {self.held_out}, which leaves no problem for training; decrease it")
        return example

    def training_batch(self, seed: int, examples: int | None, samples: Sequence[int]) -> Batch:
        """Return a batch of training samples, with the entries of `collate`.

        Args:
            seed: Seed of the problems, and of their order if they are repeated.
            examples: Number N of training problems. Samples 0 to N - 1 are these problems in random order, samples N
                to 2N - 1 are the same problems in a new order, and so on. None for a new problem in each sample.
            samples: Indices of the samples, counted over all epochs.
        """
        if examples is not None:
            samples = [int(_order(seed, k // examples, examples)[k % examples]) for k in samples]
        return collate([self.training_problem(seed, k) for k in samples])

    def distinct(self, split: Split, count: int, length: int | None = None) -> list[Example]:
        """Return ``count`` different problems of a split, or fewer if no more are found.

        The seed is always 0, so that all runs use the same validation and test problems.

        Args:
            split: ``validation`` or ``test``.
            count: Largest number of problems.
            length: Length of the problems; None for random lengths, uniform on 1..train_length.
        """
        examples: dict[str, Example] = {}
        index = last = 0  # index of this call of `draw`, and of the last call with a new problem
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
    """Return the batch of some examples, padded on the right to the longest.

    Returns:
        ``tokens`` (B, T + 1) int64, where T + 1 is the number of tokens of the longest example, and ``scored`` (B, T)
        bool, which is true for targets that are scored.
    """
    tokens = [torch.tensor(example.tokens()) for example in examples]
    scored = [torch.tensor(example.scored()) for example in examples]
    padded = pad_sequence(tokens, batch_first=True, padding_value=PAD_ID)
    return {"tokens": padded, "scored": pad_sequence(scored, batch_first=True)}


@lru_cache(maxsize=1)  # the order in the current pass
def _order(seed: int, pass_index: int, examples: int) -> np.ndarray:
    """Return the order of the problems in one pass over all of them, a permutation of 0 .. examples - 1."""
    return np.random.Generator(np.random.PCG64([seed, pass_index])).permutation(examples)


@dataclass(frozen=True)
class Examples:
    """Examples of a task on which a model is measured.

    Args:
        task: The task.
        groups: Groups of examples: one group for each of ``lengths`` in a test, a single group in a validation.
        batch_size: Largest number of examples per forward pass.
        training_length: Largest length of training problems.
        lengths: Lengths of the test problems. Some may have no example.
    """

    task: Task
    groups: Sequence[Sequence[Example]]
    batch_size: int
    training_length: int
    lengths: Sequence[int]


class HeldOutProblems:
    """Batches of fixed examples for evaluation, in order. Lightning uses it in place of a `DataLoader`.

    A batch has the entries of `collate`, and ``index`` (B,) int64, the index of each example, counted over all groups.
    Batch i belongs to rank i modulo the number of ranks. If a rank would have one batch fewer than the others, it gets
    an additional padding batch. A padding batch has one row, whose index is -1 and which is not scored.

    Args:
        groups: Groups of examples. All examples of a batch are of one group.
        batch_size: Largest number of rows of a batch.
        rank: Index of this process.
        world_size: Number of processes.
    """

    def __init__(self, groups: Sequence[Sequence[Example]], batch_size: int, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.chunks = [group[i : i + batch_size] for group in groups for i in range(0, len(group), batch_size)]
        self.starts = np.cumsum([0, *map(len, self.chunks)]).tolist()  # index of each chunk's first example

    def __len__(self) -> int:
        return math.ceil(len(self.chunks) / self.world_size)

    def __getitem__(self, item: int) -> Batch:
        batch = item * self.world_size + self.rank
        if batch >= len(self.chunks):
            padding = collate(self.chunks[0][:1])
            return padding | {"scored": padding["scored"] & False, "index": torch.tensor([-1])}
        start, chunk = self.starts[batch], self.chunks[batch]
        return collate(chunk) | {"index": torch.arange(start, start + len(chunk))}

    def __iter__(self) -> Iterator[Batch]:
        return map(self.__getitem__, range(len(self)))
