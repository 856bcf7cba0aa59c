"""Retrieval tasks: a passkey, a needle, values by their keys, and chains of variables."""

from typing import ClassVar

import numpy as np

from kerple.base.errors import require
from kerple.tasks.task import Example, Task, digits_text
from kerple.tasks.vocabulary import LETTERS

FILLER = "the grass is green. the sky is blue. the sun is yellow. here we go. there and back again. "
MOST_KEYS = 26 * 26  # number of pairs of lower-case letters


class Passkey(Task):
    """Find the number hidden in filler (Mohtashami & Jaggi 2023, arXiv 2305.16300): ``the gr[40718]ass is=40718``.

    The filler repeats the paper's five sentences from a random start. The length is the number of filler characters.
    The key has 5 digits, and is inserted into the filler at a uniformly random offset. The instructions of the paper
    are omitted, because the model is trained on the task.
    """

    axes: ClassVar[tuple[str, ...]] = ("length", "position of the key in tenths of the filler")

    def example(self, length: int, rng: np.random.Generator) -> Example:
        key = digits_text(rng.integers(10, size=5))
        offset = int(rng.integers(length + 1))
        filler = _filler(length, rng)
        return Example(f"{filler[:offset]}[{key}]{filler[offset:]}", key, (length, 10 * offset // (length + 1)))


class NeedleInFiller(Task):
    """Find the number of a given key in filler with one or more keys: ``the[xq:40] gr[bo:71]ass is;xq=40``.

    The problems are the single-key and multi-key needles of RULER (Hsieh et al. 2024, arXiv 2404.06654, section 3.1),
    in the filler of `Passkey`. A needle is a key of two lower-case letters and a number. The length is the number of
    filler characters. Offsets of the needles in the filler are uniformly random. The prompt ends with a random one of
    the keys, whose number is the answer.

    Args:
        keys: Number of needles, 1 to 676; 1 for RULER's single needle.
        digits: Number of digits of each number, 1 to 100.

    Raises:
        UserError: ``keys`` or ``digits`` is out of range.
    """

    axes: ClassVar[tuple[str, ...]] = ("length", "position of the needle in tenths of the filler")

    def __init__(self, keys: int = 1, digits: int = 4) -> None:
        require(1 <= keys <= MOST_KEYS, "data.task.keys", keys, f"1 to {MOST_KEYS}")
        require(1 <= digits <= 100, "data.task.digits", digits, "1 to 100")
        self.keys, self.digits = keys, digits

    def example(self, length: int, rng: np.random.Generator) -> Example:
        pairs = rng.choice(MOST_KEYS, self.keys, replace=False).tolist()
        keys = [LETTERS[pair // 26] + LETTERS[pair % 26] for pair in pairs]
        values = [digits_text(rng.integers(10, size=self.digits)) for _ in keys]
        offsets = sorted(rng.integers(length + 1, size=self.keys).tolist())
        text = _filler(length, rng)
        # from the last needle to the first, so that the offsets of the remaining needles stay valid
        for key, value, offset in zip(keys[::-1], values[::-1], offsets[::-1], strict=True):
            text = f"{text[:offset]}[{key}:{value}]{text[offset:]}"
        target = int(rng.integers(self.keys))  # index of the needle whose number is the answer
        return Example(f"{text};{keys[target]}", values[target], (length, 10 * offsets[target] // (length + 1)))

    @property
    def name(self) -> str:
        return "multi-key needle" if self.keys > 1 else "needle"


def _filler(length: int, rng: np.random.Generator) -> str:
    """Return ``length`` characters of the repeated filler, from a random start."""
    start = int(rng.integers(len(FILLER)))
    return (FILLER * (length // len(FILLER) + 2))[start : start + length]


class AssociativeRecall(Task):
    """Recall the values of all keys (Arora et al. 2023, arXiv 2312.04927: MQAR): ``a3b1c7=c7a3b1``.

    A key is a letter and its value a digit. The length is the number of pairs. The answer has all pairs in random
    order. Its keys are given to the model, and only the values are scored.
    """

    longest = len(LETTERS)

    def example(self, length: int, rng: np.random.Generator) -> Example:
        keys = [LETTERS[i] for i in rng.permutation(len(LETTERS))[:length].tolist()]
        pairs = [key + str(value) for key, value in zip(keys, rng.integers(10, size=length).tolist(), strict=True)]
        answer = "".join(pairs[i] for i in rng.permutation(length).tolist())
        return Example("".join(pairs), answer, (length,), not_scored=frozenset(range(0, len(answer), 2)))


class VariableChain(Task):
    """Follow signs along a chain of variables, as in LEGO (Zhang et al. 2022, arXiv 2206.04301): ``b=-a,a=+1;b=-``.

    The length is the number of clauses. Each clause defines a variable, which is a letter. The first clause of the
    chain sets a variable to ``+1`` or ``-1``. Each of the other clauses sets a variable to the previous variable of the
    chain or to the negation of that variable. The prompt has the clauses in random order and then one of the variables,
    the queried variable, whose sign is the answer. The depth is the number of clauses from the start of the chain to
    the clause that defines the queried variable.
    """

    axes: ClassVar[tuple[str, ...]] = ("length", "depth")
    longest = len(LETTERS)

    def example(self, length: int, rng: np.random.Generator) -> Example:
        names = [LETTERS[i] for i in rng.permutation(len(LETTERS))[:length].tolist()]
        flips = rng.integers(2, size=length)
        signs = ["+-"[flip] for flip in flips.tolist()]
        clauses = [f"{name}={sign}{source}" for name, sign, source in zip(names, signs, ["1", *names], strict=False)]
        order, target = rng.permutation(length).tolist(), int(rng.integers(length))
        sign = "-" if flips[: target + 1].sum() % 2 else "+"
        prompt = ",".join(clauses[i] for i in order) + f";{names[target]}"
        return Example(prompt, sign, (length, target + 1))
