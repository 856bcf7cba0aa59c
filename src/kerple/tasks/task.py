"""`Task`: for a length and a generator of random numbers, it draws a prompt and the one right answer (`Example`)."""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from kerple.base.errors import UserError
from kerple.tasks.vocabulary import BEGIN, END, LETTERS, characters_to_ids


@dataclass(frozen=True, slots=True)
class Example:
    """One problem and its solution, written as ``« prompt = answer »``.

    The answer and the end token » are scored, but not the characters of the answer that `not_scored` names.

    Args:
        prompt: The text that the model reads.
        answer: The text that it has to write.
        sizes: The length, then the other sizes that the task's `axes` name.
        not_scored: Indices of the characters of ``answer`` that are input and need not be written.
        key: Identity of the problem, equal for the same question in another order; the prompt if it is empty. It
            decides whether the problem is used in training, validation or test.
    """

    prompt: str
    answer: str
    sizes: tuple[int, ...]
    not_scored: frozenset[int] = frozenset()
    key: str = ""

    @property
    def identity(self) -> str:
        """The key, or else the prompt; it is equal for examples of the same problem."""
        return self.key or self.prompt

    @property
    def text(self) -> str:
        """The whole sequence as text, from the begin token to the end token."""
        return f"{BEGIN}{self.prompt}={self.answer}{END}"

    def tokens(self) -> list[int]:
        """The T + 1 token ids of the whole sequence: T inputs and, shifted by one, their T targets.

        Raises:
            UserError: If the task wrote a character that is not in the vocabulary.
        """
        return characters_to_ids(self.text)

    def scored(self) -> list[bool]:
        """Whether each of the T targets is scored."""
        answer = [i not in self.not_scored for i in range(len(self.answer))]
        return [False] * (len(self.prompt) + 1) + [*answer, True]


class Task(ABC):
    """A family of problems of every length.

    Subclasses override `example`, which draws random numbers from its argument ``rng`` alone: the same state of this
    generator must give the same example.
    """

    axes: ClassVar[tuple[str, ...]] = ("length",)
    """Names of the entries of `Example.sizes`, length first. The last two of several are a heat map's axes."""

    longest: int | None = None
    """Largest length for which there are problems; None if there is no bound."""

    numbers: ClassVar[bool] = False
    """Whether consecutive digits are a number, so that `Abacus` can count them (`places.abacus`)."""

    @abstractmethod
    def example(self, length: int, rng: np.random.Generator) -> Example:
        """Draw a problem of this length, 1 or more, with random numbers from ``rng`` alone."""

    def places(self, tokens: Tensor) -> Tensor:
        """Places of tokens for `kerple.positions.Coupled`, which are equal for tokens that belong together.

        The place of a token may depend on the token and those before it, but not on later ones, which do not exist yet
        when the model generates.

        Args:
            tokens: (B, T) int64, from the begin token on.

        Returns:
            (B, T) int64, 0 for a token without a place.

        Raises:
            UserError: If the task, or this form of its problems, has no places.
        """
        raise UserError(f"data.task: got {self.name!r}, which defines no places, expected one such as Addition")

    @property
    def name(self) -> str:
        """Name of the task in logs and reports, in lower case."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(self).__name__).lower()


def digits_text(digits: np.ndarray) -> str:
    """The digits of an integer array as text."""
    return "".join(map(str, digits.tolist()))


def letters_text(numbers: np.ndarray) -> str:
    """The letters of an integer array, numbers of `LETTERS`, as text."""
    return "".join(map(LETTERS.__getitem__, numbers.tolist()))


def check_option(task: Task, name: str, number: int, smallest: int, largest: int) -> None:
    """Check that an option of a task is in its range.

    Raises:
        UserError: If it is not.
    """
    if not smallest <= number <= largest:
        raise UserError(f"{type(task).__name__}: {name}: got {number}, expected {smallest} to {largest}")
