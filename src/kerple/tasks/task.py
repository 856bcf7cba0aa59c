"""`Task`, which draws problems of a given length, and `Example`, which is a problem with its answer."""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from kerple.base.errors import UserError
from kerple.tasks.vocabulary import BEGIN, END, characters_to_ids


@dataclass(frozen=True, slots=True)
class Example:
    """A problem and its answer, written as ``«prompt=answer»``, where « and » are the begin and the end token.

    The answer and the end token are scored, except the characters in ``not_scored``.

    Args:
        prompt: Input of the model.
        answer: Expected output of the model.
        sizes: Sizes of the problem, as named by `Task.axes`; the length is first.
        not_scored: Indices of the characters of ``answer`` that the model reads but does not predict.
        key: Identity of the problem, which determines its split. It is equal for equivalent prompts, such as ``a+b``
            and ``b+a``. If empty, the prompt is the identity.
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
        """The characters of the whole sequence, from the begin token to the end token."""
        return f"{BEGIN}{self.prompt}={self.answer}{END}"

    def tokens(self) -> list[int]:
        """Return the T + 1 token ids of the whole sequence: T inputs and, shifted by one, their T targets.

        Raises:
            UserError: A character is not in the vocabulary.
        """
        return characters_to_ids(self.text)

    def scored(self) -> list[bool]:
        """Return for each of the T targets whether it is scored."""
        answer = [i not in self.not_scored for i in range(len(self.answer))]
        return [False] * (len(self.prompt) + 1) + [*answer, True]


class Task(ABC):
    """Base class of tasks, which draw random problems of a given length.

    Subclasses implement `example`. Its result must depend only on its arguments and the state of ``rng``.
    """

    axes: ClassVar[tuple[str, ...]] = ("length",)
    """Names of the entries of `Example.sizes`; the length is first.

    If there are several, the last two are the axes of a heat map."""

    longest: int | None = None
    """Largest length of problems; None if there is no limit."""

    numbers: ClassVar[bool] = False
    """Whether the strategy `Abacus` accepts the task. `Abacus` gives place i to the i-th digit of each run of digits.

    True for arithmetic tasks, in which a run of digits is an operand, a result, or the bits of `Parity`."""

    @abstractmethod
    def example(self, length: int, rng: np.random.Generator) -> Example:
        """Return a random problem of this length, 1 to `longest`, with all random numbers from ``rng``."""

    def most_inputs(self, length: int) -> int | None:
        """Return the largest number of inputs of a problem of this length; None to find it from random problems.

        A task whose longest problems are rare overrides this method.
        """
        return None

    def places(self, tokens: Tensor) -> Tensor:
        """Return a place for each token, for `kerple.positions.Coupled`.

        Tokens with the same role, such as the last digits of two summands and of their sum, have equal places.

        The place of a token must not depend on later tokens, because they do not exist yet during generation.

        Args:
            tokens: Token ids (B, T) int64, starting with the begin token.

        Returns:
            Places (B, T) int64, 0 for tokens without a place.

        Raises:
            UserError: The task has no places, or has none with its current options.
        """
        raise UserError(f"data.task: got {self.name!r}, expected a task that assigns places, such as Addition")

    @property
    def name(self) -> str:
        """Name of the task in logs and reports, in lower case."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(self).__name__).lower()


def digits_text(digits: np.ndarray) -> str:
    """Return the digits in an integer array (n,) as a string."""
    return "".join(map(str, digits.tolist()))
