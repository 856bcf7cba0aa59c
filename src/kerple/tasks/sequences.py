"""Tasks that rearrange a sequence: copy, reverse, sort."""

import numpy as np
from torch import Tensor

from kerple.base.errors import require
from kerple.tasks.task import Example, Task
from kerple.tasks.token_places import LETTER_IDS, aligned_places, mirrored
from kerple.tasks.vocabulary import LETTERS


class _LetterTask(Task):
    """Base class of tasks on a sequence of random letters.

    Args:
        symbols: Number of different letters, 2 to 52.

    Raises:
        UserError: ``symbols`` is out of range.
    """

    def __init__(self, symbols: int = 26) -> None:
        require(2 <= symbols <= len(LETTERS), "data.task.symbols", symbols, f"2 to {len(LETTERS)}")
        self.symbols = symbols

    def letters(self, length: int, rng: np.random.Generator) -> str:
        """Return a random sequence of this length."""
        return "".join(LETTERS[i] for i in rng.integers(self.symbols, size=length))


class Copy(_LetterTask):
    """Repeat the sequence (Kazemnejad et al. 2023, arXiv 2305.19466, table 1): ``cabb=cabb``.

    Args:
        repeated: Whether the sequence repeats one letter, so that the task is to count. Each length then has only one
            problem for each letter, and few test problems. Reports state the number of test problems.
        symbols: Number of different letters, 2 to 52.

    Raises:
        UserError: ``symbols`` is out of range.
    """

    def __init__(self, repeated: bool = False, symbols: int = 26) -> None:
        super().__init__(symbols)
        self.repeated = repeated

    def example(self, length: int, rng: np.random.Generator) -> Example:
        text = self.letters(1, rng) * length if self.repeated else self.letters(length, rng)
        return Example(text, text, (length,))

    def places(self, tokens: Tensor) -> Tensor:
        return aligned_places(tokens, LETTER_IDS)

    @property
    def name(self) -> str:
        return "repeated copy" if self.repeated else super().name


class Reverse(_LetterTask):
    """Reverse the sequence (Kazemnejad et al. 2023, table 1): ``cab=bac``.

    Args:
        symbols: Number of different letters, 2 to 52.

    Raises:
        UserError: ``symbols`` is out of range.
    """

    def example(self, length: int, rng: np.random.Generator) -> Example:
        text = self.letters(length, rng)
        return Example(text, text[::-1], (length,))

    def places(self, tokens: Tensor) -> Tensor:
        return mirrored(tokens, LETTER_IDS)


class Sort(_LetterTask):
    """Sort the letters in ascending order, with repetitions (Kazemnejad et al. 2023, table 1): ``cabb=abbc``.

    Args:
        symbols: Number of different letters, 2 to 52.

    Raises:
        UserError: ``symbols`` is out of range.
    """

    def example(self, length: int, rng: np.random.Generator) -> Example:
        text = self.letters(length, rng)
        return Example(text, "".join(sorted(text, key=LETTERS.index)), (length,))
