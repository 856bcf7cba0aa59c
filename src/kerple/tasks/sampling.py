"""Random sampling of examples: sample k depends on seed, split and k alone, whatever ranks and workers there are.

No test example occurs in training:

- up to the training length, a hash of the problem assigns it to training, validation or test, and problems are drawn
  until one belongs to the split that is asked for;
- longer problems do not occur in training at all.

The hash does not depend on the seed, so all runs of a comparison hold out the same problems.
"""

from collections.abc import Iterator
from hashlib import blake2b
from typing import Literal, get_args

import numpy as np

from kerple.tasks.base import Example, Task

Split = Literal["train", "validation", "test"]
MOST_DRAWS = 1000  # draws after which a split counts as empty
STALE = 200  # draws without a new problem after which a length counts as exhausted


def belongs_to(example: Example, held_out: float) -> Split:
    """The split of a problem no longer than the training length.

    Args:
        example: The problem.
        held_out: Share of all problems that is kept for testing; the same share is kept for validation.
    """
    place = int.from_bytes(blake2b(example.identity.encode(), digest_size=8).digest(), "big") / 2**64
    return "test" if place < held_out else "validation" if place < 2 * held_out else "train"


def draw(
    task: Task, split: Split, seed: int, index: int, train_length: int, held_out: float, length: int | None = None
) -> Example | None:
    """Draw sample number ``index`` of a split.

    Args:
        task: The task.
        split: ``train``, ``validation`` or ``test``.
        seed: Chooses the samples, 0 to 2⁶⁴ - 1.
        index: Number of the sample, from 0.
        train_length: Largest length of training problems.
        held_out: Share of the problems that is kept for testing, see `belongs_to`.
        length: Length of the problem; None for a random one, uniform on 1..train_length.

    Returns:
        The example, or None if the split has no, or hardly any, problems of that length.
    """
    stream = np.random.Philox(key=[seed, index], counter=[0, 0, length or 0, get_args(Split).index(split)])
    rng = np.random.Generator(stream)
    if length is None:
        length = int(rng.integers(1, train_length + 1))
    for _ in range(MOST_DRAWS):
        example = task.example(length, rng)
        if (split == "test" and length > train_length) or belongs_to(example, held_out) == split:
            return example
    return None


def distinct(
    task: Task, split: Split, count: int, train_length: int, held_out: float, length: int | None = None
) -> list[Example]:
    """Draw up to ``count`` different examples, or fewer if the split has no more.

    The other arguments are those of `draw`. The seed is always 0, so that all runs are tested on the same problems.
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
