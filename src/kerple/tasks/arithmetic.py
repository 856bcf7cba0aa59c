"""Arithmetic tasks: addition, multiplication by a digit, sums modulo 10, parity, polynomials."""

from typing import ClassVar, Literal

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from kerple.base.errors import require
from kerple.tasks.task import Example, Task, digits_text
from kerple.tasks.token_places import DIGIT_IDS, aligned_places
from kerple.tasks.vocabulary import IDS

MOST_DIGITS = 4299  # Python converts at most 4,300 digits to a number, and a sum can have one more than its operands
DigitOrder = Literal["plain", "reversed"]


class Addition(Task):
    """The sum of two natural numbers (Kazemnejad et al. 2023, arXiv 2305.19466, table 1): ``36+57=93``.

    The length of a problem is the number of digits of the longer operand. If the operands have m and n digits, all
    pairs (m, n) whose maximum is the length are equally likely. ``a+b`` and ``b+a`` have the same key, so they belong
    to the same split.

    Args:
        order: ``plain`` writes numbers with the most significant digit first. ``reversed`` writes operands and sum with
            the least significant digit first, so that carries propagate in the order of generation (Lee et al. 2023,
            arXiv 2307.03381).
        padded: Whether operands are padded with zeros to the length, and the sum to one more digit (Zhou et al. 2024,
            arXiv 2402.09371).
        equal: Whether both operands have the same number of digits, which is the length.
    """

    axes: ClassVar[tuple[str, ...]] = ("length", "digits of the first operand", "digits of the second operand")
    numbers = True
    longest = MOST_DIGITS

    def __init__(self, order: DigitOrder = "plain", padded: bool = False, equal: bool = False) -> None:
        self.order, self.padded, self.equal = order, padded, equal

    def example(self, length: int, rng: np.random.Generator) -> Example:
        sizes = [length, length]
        if not self.equal:
            pair = int(rng.integers(2 * length - 1))  # index of one of the pairs of sizes whose maximum is the length
            sizes[pair % 2] = length - (pair + 1) // 2
        a, b = (_number(size, rng) for size in sizes)
        width = length if self.padded else 0
        texts = [a.zfill(width), b.zfill(width), str(int(a) + int(b)).zfill(width and width + 1)]
        first, second, total = [text[::-1] for text in texts] if self.order == "reversed" else texts
        return Example(f"{first}+{second}", total, (length, *sizes), key="+".join(sorted((a, b))))

    def most_inputs(self, length: int) -> int:
        return 3 * length + 4  # two operands and a sum of length + 1 digits, the begin token, the + and the =

    def places(self, tokens: Tensor) -> Tensor:
        """Return equal places for digits of equal significance, as `kerple.tasks.token_places.aligned_places` does.

        With padding, the ``+`` has the place that follows the digits of the first operand. The sum has one more digit,
        so that its final digit has the same place as the ``+``. The place of the ``+`` therefore tells the model where
        the sum ends. In Cho et al. 2024, arXiv 2405.20671, the ``+`` has the place of the ``=``.
        """
        _check_order(self.order)
        places = aligned_places(tokens, DIGIT_IDS)
        next_place = F.pad(places, (1, -1)) + 1  # the place of the previous token plus one
        return next_place.where(tokens == IDS["+"], places) if self.padded else places


class Multiplication(Task):
    """The product of a natural number and a digit: ``36*7=252``. The length is the number of digits of the number.

    Args:
        order: ``plain`` writes the most significant digit first. ``reversed`` writes number and product with the least
            significant digit first.
        padded: Whether the product is padded with zeros to one more digit than the number.
    """

    axes: ClassVar[tuple[str, ...]] = ("length", "the digit")
    numbers = True
    longest = MOST_DIGITS

    def __init__(self, order: DigitOrder = "plain", padded: bool = False) -> None:
        self.order, self.padded = order, padded

    def example(self, length: int, rng: np.random.Generator) -> Example:
        number, digit = _number(length, rng), int(rng.integers(10))
        product = str(int(number) * digit).zfill(length + 1 if self.padded else 0)
        if self.order == "reversed":
            number, product = number[::-1], product[::-1]
        return Example(f"{number}*{digit}", product, (length, digit))

    def places(self, tokens: Tensor) -> Tensor:
        """Return equal places for digits of equal significance, and none for the digit after the ``*``."""
        _check_order(self.order)
        is_factor = F.pad(tokens == IDS["*"], (1, -1))  # the token after the *
        return aligned_places(tokens, DIGIT_IDS).where(~is_factor, 0)


def _check_order(order: str) -> None:
    """Raise a UserError unless the order is ``reversed``. With ``plain``, places would depend on later digits."""
    require(order == "reversed", "data.task.order", order, "reversed with model.position Coupled")


def _number(digits: int, rng: np.random.Generator) -> str:
    """Return a uniformly random decimal number with the given number of digits; 0 has one digit."""
    number = rng.integers(10, size=digits)
    if digits > 1:
        number[0] = rng.integers(1, 10)
    return digits_text(number)


class ModularSum(Task):
    """The sum of digits modulo 10 (Kazemnejad et al. 2023, table 1: Summation): ``8+3+1=2``.

    The length is the number of digits.
    """

    numbers = True

    def example(self, length: int, rng: np.random.Generator) -> Example:
        digits = rng.integers(10, size=length)
        return Example("+".join(map(str, digits.tolist())), str(digits.sum() % 10), (length,))


class Parity(Task):
    """Whether the number of ones is even (0) or odd (1) (Kazemnejad et al. 2023, table 1): ``1101=1``.

    The length is the number of bits.
    """

    numbers = True

    def example(self, length: int, rng: np.random.Generator) -> Example:
        bits = rng.integers(2, size=length)
        return Example(digits_text(bits), str(bits.sum() % 2), (length,))


class Polynomial(Task):
    """The value of a polynomial modulo 10 (Kazemnejad et al. 2023, table 1): ``-2:3*x^2-1*x^3=0``.

    The first number is the value of x, which is -2 to 2. The length is the number of terms. Coefficients are -3 to 3,
    degrees are 0 to 3, and 0^0 is 1. The answer is 0 to 9, also for negative values.
    """

    numbers = True

    def example(self, length: int, rng: np.random.Generator) -> Example:
        x, coefficients = int(rng.integers(-2, 3)), rng.integers(-3, 4, size=length).tolist()
        degrees = rng.integers(4, size=length).tolist()
        terms = "".join(f"{c:+d}*x^{d}" for c, d in zip(coefficients, degrees, strict=True)).removeprefix("+")
        value = sum(c * x**d for c, d in zip(coefficients, degrees, strict=True))
        return Example(f"{x}:{terms}", str(value % 10), (length,))
