"""What a task is: for a length and a generator of random numbers, a prompt and the one right answer."""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from kerple.errors import UserError
from kerple.tasks.vocabulary import BEGIN, BEGIN_ID, END, END_ID, IDS


@dataclass(frozen=True, slots=True)
class Example:
    """One problem and its solution.

    As a sequence it is ``« prompt = answer »`` or, with a scratchpad, ``« prompt = scratchpad > answer »``. Everything
    after the ``=`` is scored, the end token » too, except what `given` names.

    Args:
        prompt: What the model reads.
        answer: What it has to write.
        sizes: The length, then what else is counted along the task's `axes`.
        scratchpad: What it writes before the answer; empty if the task is solved without one.
        given: Indices of the characters of ``answer`` that are told, not asked.
        key: Equal for problems that are the same question in another order; the prompt if empty. The partition into
            training, validation and test goes by it.
    """

    prompt: str
    answer: str
    sizes: tuple[int, ...]
    scratchpad: str = ""
    given: frozenset[int] = frozenset()
    key: str = ""

    @property
    def identity(self) -> str:
        """What makes two examples the same problem."""
        return self.key or self.prompt

    @property
    def text(self) -> str:
        """The whole sequence, begin and end included."""
        written = f"{self.scratchpad}>{self.answer}" if self.scratchpad else self.answer
        return f"{BEGIN}{self.prompt}={written}{END}"

    def tokens(self) -> list[int]:
        """Token ids of the whole sequence: T inputs and, one further, their T targets."""
        middle = f"{self.prompt}={self.scratchpad}>{self.answer}" if self.scratchpad else f"{self.prompt}={self.answer}"
        return [BEGIN_ID, *map(IDS.__getitem__, middle), END_ID]

    def scored(self) -> list[bool]:
        """For each of the T targets whether it counts."""
        start = len(self.prompt) + (len(self.scratchpad) + 1 if self.scratchpad else 0)
        told = [i not in self.given for i in range(len(self.answer))] if self.given else [True] * len(self.answer)
        return [False] * (len(self.prompt) + 1) + [True] * (start - len(self.prompt)) + [*told, True]


class Task(ABC):
    """A family of problems indexed by length.

    Subclasses are pure functions of their arguments: the same generator state gives the same example.
    """

    axes: ClassVar[tuple[str, ...]] = ("length",)
    """What `Example.sizes` counts, length first. Accuracy is also mapped over the last two where there are several."""

    longest: int | None = None
    """Largest length there are problems of; None where there is no bound."""

    scratchpad: bool = False
    """Whether steps are written before the answer."""

    numbers: ClassVar[bool] = False
    """Whether digits side by side are a number, so that they can be counted (`places.abacus`)."""

    @abstractmethod  # keeps the class abstract: jsonargparse would accept a concrete base as a task
    def __init__(self) -> None: ...

    @abstractmethod
    def example(self, length: int, rng: np.random.Generator) -> Example:
        """Draw a problem of exactly this length (>= 1)."""

    def places(self, tokens: Tensor) -> Tensor:
        """Where the task says that tokens stand, for `kerple.positions.Coupled`: those that belong together at one
        place, a causal function of the tokens, so that generation needs nothing else.

        Args:
            tokens: (B, T) int64, from the begin token on.

        Returns:
            (B, T) int64, 0 for a token that has no place.

        Raises:
            UserError: If the task, or this way of writing it, has no such places.
        """
        raise UserError(
            f"task: {self.name} says nothing of places, which model.position Coupled asks for; use a task that does, "
            "such as Addition with order: reversed, or another strategy"
        )

    @property
    def name(self) -> str:
        """What the task is called in logs and reports, in lower case."""
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(self).__name__).lower()
        return f"{words} with scratchpad" if self.scratchpad else words


def spelled(digits: np.ndarray) -> str:
    """Digits 0 to 9 in an integer array as text."""
    return "".join(map(str, digits.tolist()))
