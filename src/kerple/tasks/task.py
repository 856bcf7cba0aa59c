"""`Task`, which draws problems of a given length, and `Example`, a problem with its answer."""

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
    """A problem and its answer, written as ``« prompt = answer »``.

    The answer and the end token » are scored, except characters in `not_scored`.

    Args:
        prompt: Input of the model.
        answer: Expected output of the model.
        sizes: Sizes of the problem, as named by `Task.axes`; the length is first.
        not_scored: Indices of characters of ``answer`` that are input.
        key: Identity of the problem, equal for equivalent prompts such as ``a+b`` and ``b+a``; the prompt if empty. It
            determines the split of the problem.
    """

    prompt: str
    answer: str
    sizes: tuple[int, ...]
    not_scored: frozenset[int] = frozenset()
    key: str = ""

    @property
    def identity(self) -> str:
        """The key, or the prompt if there is no key."""
        return self.key or self.prompt

    @property
    def text(self) -> str:
        """The whole sequence as text, from the begin token to the end token."""
        return f"{BEGIN}{self.prompt}={self.answer}{END}"

    def tokens(self) -> list[int]:
        """Return the T + 1 token ids of the whole sequence: T inputs and, shifted by one, their T targets.

        Raises:
            UserError: If a character is not in the vocabulary.
        """
        return characters_to_ids(self.text)

    def scored(self) -> list[bool]:
        """Return whether each of the T targets is scored."""
        answer = [i not in self.not_scored for i in range(len(self.answer))]
        return [False] * (len(self.prompt) + 1) + [*answer, True]


class Task(ABC):
    """Family of problems of any length.

    Subclasses override `example`, whose result must depend only on its arguments and the state of ``rng``.
    """

    axes: ClassVar[tuple[str, ...]] = ("length",)
    """Names of the entries of `Example.sizes`; the length is first. The last two names are the axes of a heat map."""

    longest: int | None = None
    """Largest length of problems; None if there is no limit."""

    numbers: ClassVar[bool] = False
    """Whether consecutive digits are a number, as `Abacus` requires (`places.abacus`)."""

    @abstractmethod
    def example(self, length: int, rng: np.random.Generator) -> Example:
        """Draw a problem of this length, 1 or more, with random numbers from ``rng``."""

    def places(self, tokens: Tensor) -> Tensor:
        """Return places of tokens for `kerple.positions.Coupled`, equal for tokens that belong together.

        The place of a token must not depend on later tokens, which do not exist during generation.

        Args:
            tokens: (B, T) int64, starting with the begin token.

        Returns:
            (B, T) int64, 0 for tokens without a place.

        Raises:
            UserError: If the task has no places with its options.
        """
        raise UserError(f"data.task: got {self.name!r}, expected a task with places for Coupled, such as Addition")

    @property
    def name(self) -> str:
        """Name of the task in logs and reports, in lower case."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(self).__name__).lower()


def digits_text(digits: np.ndarray) -> str:
    """Return the digits of an integer array as text."""
    return "".join(map(str, digits.tolist()))


def letters_text(numbers: np.ndarray) -> str:
    """Return the letters of an integer array, indices of `LETTERS`, as text."""
    return "".join(map(LETTERS.__getitem__, numbers.tolist()))


def check_option(task: Task, name: str, number: int, smallest: int, largest: int) -> None:
    """Raise a UserError if an option of a task is out of range."""
    if not smallest <= number <= largest:
        raise UserError(f"{type(task).__name__}: {name}: got {number}, expected {smallest} to {largest}")
