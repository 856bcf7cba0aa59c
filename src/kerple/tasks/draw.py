"""Which example is sample k: a pure function of seed, split and number, the same for any number of ranks and workers.

No test example occurs in training, by construction:

- up to the training length, a hash of the problem itself says whether it belongs to training, validation or test, and
  what is drawn is rejected until it belongs to the split that is asked for;
- beyond it every problem is new, because the length is part of the problem.

The hash knows no seed: all runs of a comparison hold out the same problems.
"""

from collections.abc import Iterator
from hashlib import blake2b
from typing import Literal

import numpy as np

from kerple.tasks.base import Example, Task

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")
ATTEMPTS = 1000
STALE = 200  # draws without a new problem after which a length counts as exhausted


def belongs_to(example: Example, held_out: float) -> Split:
    """The split of a problem no longer than the training length.

    Args:
        example: The problem.
        held_out: Share of all problems that is for testing, and the same share for validation.
    """
    place = int.from_bytes(blake2b(example.identity.encode(), digest_size=8).digest(), "big") / 2**64
    return "test" if place < held_out else "val" if place < 2 * held_out else "train"


def draw(
    task: Task, split: Split, seed: int, index: int, train_length: int, held_out: float, length: int | None = None
) -> Example | None:
    """Sample number ``index`` of a split.

    Args:
        task: What is asked.
        split: Training, validation or test.
        seed: Of the split's stream, 0 to 2⁶⁴ - 1.
        index: Sample number, from 0.
        train_length: Training lengths are uniform on 1 to this.
        held_out: As for `belongs_to`.
        length: Of the problem; uniform on 1 to ``train_length`` if None.

    Returns:
        The example, or None if the split has no, or next to no, problems of that length.
    """
    stream = np.random.Philox(key=[seed, index], counter=[0, 0, length or 0, SPLITS.index(split)])
    rng = np.random.Generator(stream)
    if length is None:
        length = int(rng.integers(1, train_length + 1))
    for _ in range(ATTEMPTS):
        example = task.example(length, rng)
        if (split == "test" and length > train_length) or belongs_to(example, held_out) == split:
            return example
    return None


def distinct(
    task: Task, split: Split, count: int, train_length: int, held_out: float, length: int | None = None
) -> list[Example]:
    """Up to ``count`` different examples, fewer where the split has no more: a small space is not counted twice.

    Arguments as for `draw`. The stream's seed is 0 whatever the run's, so that all runs are asked the same.
    """

    def fresh() -> Iterator[Example]:
        seen: set[str] = set()
        index = last = 0
        while index - last <= STALE:
            example = draw(task, split, 0, index, train_length, held_out, length)
            if example is None and length is not None:
                return
            if example is not None and example.prompt not in seen:
                seen.add(example.prompt)
                last = index
                yield example
            index += 1

    return [example for example, _ in zip(fresh(), range(count), strict=False)]
