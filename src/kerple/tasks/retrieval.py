"""Tasks of retrieval from a long input: a passkey, a needle, and values by their keys."""

from typing import ClassVar

import numpy as np

from kerple.base.errors import UserError
from kerple.tasks.base import Example, Task, lettered, spelled
from kerple.tasks.vocabulary import LETTERS

FILLER = "the grass is green. the sky is blue. the sun is yellow. here we go. there and back again. "
MOST_KEYS = 26 * 26  # pairs of small letters


class Passkey(Task):
    """Find the number hidden in filler (Mohtashami & Jaggi 2023, arXiv 2305.16300): ``the gr[40718]ass is=40718``.

    The length is the number of filler characters; the place of the key is uniform. The paper's instructions are left
    out, because the model is trained on the task.

    Args:
        digits: Number of digits of the key, 1 or more.
        filler: ``sentences`` repeats the paper's five sentences from a random start; ``letters`` draws random letters.

    Raises:
        UserError: If digits is not positive or the filler is neither.
    """

    axes: ClassVar[tuple[str, ...]] = ("length", "tenth of the filler before the key")

    def __init__(self, digits: int = 5, filler: str = "sentences") -> None:
        _check(self, digits, filler)
        self.digits, self.filler = digits, filler

    def example(self, length: int, rng: np.random.Generator) -> Example:
        key = spelled(rng.integers(10, size=self.digits))
        place = int(rng.integers(length + 1))
        filler = _filler(self.filler, length, rng)
        return Example(f"{filler[:place]}[{key}]{filler[place:]}", key, (length, 10 * place // (length + 1)))


class Needle(Task):
    """Find the number under a key, among others under other keys: ``the[xq:40] gr[bo:71]ass is;xq=40``.

    The problems are those of RULER with one and with many keys (Hsieh et al. 2024, arXiv 2404.06654, section 3.1), in
    this vocabulary. The length is the number of filler characters; places are uniform, and a random key is asked for.
    A model that stays fluent at long lengths without using them fails.

    Args:
        keys: Number of needles; 1 for RULER's single needle.
        digits: Number of digits of each number, 1 or more.
        filler: ``sentences`` or ``letters``, as for `Passkey`.

    Raises:
        UserError: If a number is not positive, there are more keys than pairs of letters, or the filler is neither.
    """

    axes: ClassVar[tuple[str, ...]] = ("length", "tenth of the filler before the needle")

    def __init__(self, keys: int = 1, digits: int = 4, filler: str = "sentences") -> None:
        _check(self, digits, filler)
        if not 1 <= keys <= MOST_KEYS:
            raise UserError(f"Needle: keys: got {keys}, expected 1 to {MOST_KEYS}")
        self.keys, self.digits, self.filler = keys, digits, filler

    def example(self, length: int, rng: np.random.Generator) -> Example:
        pairs = rng.choice(MOST_KEYS, self.keys, replace=False).tolist()
        keys = [LETTERS[pair // 26] + LETTERS[pair % 26] for pair in pairs]
        values = [spelled(rng.integers(10, size=self.digits)) for _ in keys]
        places = sorted(rng.integers(length + 1, size=self.keys).tolist())
        filler = _filler(self.filler, length, rng)
        text, before = "", 0
        for key, value, place in zip(keys, values, places, strict=True):
            text += f"{filler[before:place]}[{key}:{value}]"
            before = place
        asked = int(rng.integers(self.keys))
        prompt = f"{text}{filler[before:]};{keys[asked]}"
        return Example(prompt, values[asked], (length, 10 * places[asked] // (length + 1)))

    @property
    def name(self) -> str:
        return "multi-key needle" if self.keys > 1 else super().name


def _check(task: Task, digits: int, filler: str) -> None:
    name = type(task).__name__
    if digits < 1:
        raise UserError(f"{name}: digits: got {digits}, expected at least 1")
    if filler not in ("sentences", "letters"):
        raise UserError(f"{name}: filler: got {filler!r}, expected 'sentences' or 'letters'")


def _filler(kind: str, length: int, rng: np.random.Generator) -> str:
    if kind == "sentences":
        start = int(rng.integers(len(FILLER)))
        return (FILLER * (length // len(FILLER) + 2))[start : start + length]
    return lettered(rng.integers(26, size=length))


class AssociativeRecall(Task):
    """Recall values by their keys, many times (Arora et al. 2023, arXiv 2312.04927: MQAR): ``a3b1c7=c7a3b1``.

    The length is the number of pairs of a letter and a digit. After the ``=`` keys follow in random order. The keys are
    given, and only the value after each is scored.

    Args:
        queries: Number of keys that are asked for; None for all. Of fewer pairs all are asked for.

    Raises:
        UserError: If queries is not positive.
    """

    longest = len(LETTERS)

    def __init__(self, queries: int | None = None) -> None:
        if queries is not None and queries < 1:
            raise UserError(f"AssociativeRecall: queries: got {queries}, expected at least 1, or none for all keys")
        self.queries = queries

    def example(self, length: int, rng: np.random.Generator) -> Example:
        keys = [LETTERS[i] for i in rng.permutation(len(LETTERS))[:length].tolist()]
        pairs = [key + str(value) for key, value in zip(keys, rng.integers(10, size=length).tolist(), strict=True)]
        asked = rng.permutation(length)[: self.queries or length].tolist()
        answer = "".join(pairs[i] for i in asked)
        return Example("".join(pairs), answer, (length,), given=frozenset(range(0, len(answer), 2)))
