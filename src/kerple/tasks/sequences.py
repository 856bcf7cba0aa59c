"""Tasks that rearrange a sequence: copy, reverse, sort."""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from kerple.tasks.base import Example, Task, check_option, letters_text
from kerple.tasks.places import LETTER_IDS, in_step, mirrored
from kerple.tasks.vocabulary import LETTERS


class Copy(Task):
    """Repeat the sequence (Kazemnejad et al. 2023, arXiv 2305.19466, table 1): ``cabb=cabb``.

    Args:
        repeated: Whether the sequence repeats one letter, so that the task is to count. Each length then has as many
            problems as there are symbols, of which few are held out of training; their number is reported.
        symbols: Number of different letters, 2 to 52.

    Raises:
        UserError: If symbols is out of range.
    """

    def __init__(self, repeated: bool = False, symbols: int = 26) -> None:
        check_option(self, "symbols", symbols, 2, len(LETTERS))
        self.repeated, self.symbols = repeated, symbols

    def example(self, length: int, rng: np.random.Generator) -> Example:
        if self.repeated:
            text = LETTERS[rng.integers(self.symbols)] * length
        else:
            text = letters_text(rng.integers(self.symbols, size=length))
        return Example(text, text, (length,))

    def places(self, tokens: Tensor) -> Tensor:
        return in_step(tokens, LETTER_IDS)

    @property
    def name(self) -> str:
        return "repeated copy" if self.repeated else super().name


class Reverse(Task):
    """The sequence backwards (Kazemnejad et al. 2023, table 1): ``cab=bac``.

    Args:
        symbols: Number of different letters, 2 to 52.

    Raises:
        UserError: If symbols is out of range.
    """

    def __init__(self, symbols: int = 26) -> None:
        check_option(self, "symbols", symbols, 2, len(LETTERS))
        self.symbols = symbols

    def example(self, length: int, rng: np.random.Generator) -> Example:
        text = letters_text(rng.integers(self.symbols, size=length))
        return Example(text, text[::-1], (length,))

    def places(self, tokens: Tensor) -> Tensor:
        return mirrored(tokens, LETTER_IDS)


class Sort(Task):
    """The sequence in ascending order, repetitions kept (Kazemnejad et al. 2023, table 1): ``cabb=abbc``.

    Args:
        digits: With 0, the sequence consists of letters. With a larger number, it consists of decimal numbers of 1 to
            so many digits, separated by commas; each number of digits is equally likely: ``7,103,25=7,25,103``.
        symbols: Number of different letters if digits is 0, 2 to 52.

    Raises:
        UserError: If digits is not 0 to 18 or symbols is out of range.
    """

    def __init__(self, digits: int = 0, symbols: int = 26) -> None:
        check_option(self, "symbols", symbols, 2, len(LETTERS))
        check_option(self, "digits", digits, 0, 18)  # what int64 holds
        self.digits, self.symbols = digits, symbols

    def example(self, length: int, rng: np.random.Generator) -> Example:
        write: Callable[[int], str]
        if self.digits:
            powers = 10 ** rng.integers(self.digits, size=length)  # smallest number of that many digits
            low = np.where(powers == 1, 0, powers)
            values, write, separator = rng.integers(low, 10 * powers).tolist(), str, ","
        else:
            values, write, separator = rng.integers(self.symbols, size=length).tolist(), LETTERS.__getitem__, ""
        prompt, answer = (separator.join(map(write, numbers)) for numbers in (values, sorted(values)))
        return Example(prompt, answer, (length,))

    @property
    def name(self) -> str:
        return super().name.replace("sort", "sort numbers") if self.digits else super().name
