"""Tasks that look something up far back: a passkey, or values by their keys."""

from typing import ClassVar

import numpy as np

from kerple.errors import UserError
from kerple.tasks.base import Example, Task, spelled
from kerple.tasks.vocabulary import LETTERS

FILLER = "the grass is green. the sky is blue. the sun is yellow. here we go. there and back again. "


class Passkey(Task):
    """Find the number hidden in filler (Mohtashami & Jaggi 2023, arXiv 2305.16300): ``the gr[40718]ass is=40718``.

    Its length is the number of filler characters; the place of the key is uniform. The paper's instruction sentences
    are left out: the model is trained on the task.

    Args:
        digits: Length of the key, 1 or more.
        filler: ``sentences`` repeats the paper's five, cut to length from a random start; ``letters`` draws each
            letter.

    Raises:
        UserError: If digits is not positive or the filler is neither.
    """

    axes: ClassVar[tuple[str, ...]] = ("length", "tenth of the filler before the key")

    def __init__(self, digits: int = 5, filler: str = "sentences") -> None:
        if digits < 1:
            raise UserError(f"Passkey: digits: got {digits}, expected at least 1")
        if filler not in ("sentences", "letters"):
            raise UserError(f"Passkey: filler: got {filler!r}, expected 'sentences' or 'letters'")
        self.digits, self.filler = digits, filler

    def example(self, length: int, rng: np.random.Generator) -> Example:
        key = spelled(rng.integers(10, size=self.digits))
        place = int(rng.integers(length + 1))
        if self.filler == "sentences":
            start = int(rng.integers(len(FILLER)))
            filler = (FILLER * (length // len(FILLER) + 2))[start : start + length]
        else:
            filler = "".join(map(LETTERS.__getitem__, rng.integers(26, size=length).tolist()))
        return Example(f"{filler[:place]}[{key}]{filler[place:]}", key, (length, 10 * place // (length + 1)))


class AssociativeRecall(Task):
    """Recall values by their keys, many times (Arora et al. 2023, arXiv 2312.04927: MQAR): ``a3b1c7=c7a3b1``.

    Its length is the number of pairs of a letter and a digit. After the ``=`` keys are asked for in a random order;
    each key is given and only the value behind it is scored.

    Args:
        queries: How many keys are asked for; all of them if None. At lengths with fewer pairs, all.

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
