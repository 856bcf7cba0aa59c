"""Needle-in-a-haystack problems as RULER names and defines them (Hsieh et al. 2024, arXiv 2404.06654, section 3.1).

The callback `Needle` asks a model for the answers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from kerple.base.errors import UserError

Kind = Literal["niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multivalue"]
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
ADJECTIVES = ("ancient", "bitter", "clever", "distant", "eager", "famous", "gentle", "hollow", "jolly", "lively")
NOUNS = ("anchor", "basket", "candle", "desert", "engine", "forest", "garden", "hammer", "island", "kettle")
NEEDLES = 4  # number of keys in niah_multikey_1, of values in niah_multivalue
ANSWER = 16  # number of tokens that the model may write for each value


@dataclass(frozen=True)
class Problem:
    """A problem: sentences to hide in a haystack, and a question about them.

    Args:
        needles: For each sentence, the share of the haystack that comes before it, 0..1, and the sentence.
        question: Text that follows the haystack, which the model has to continue.
        values: The numbers that the answer has to contain.
    """

    needles: tuple[tuple[float, str], ...]
    question: str
    values: tuple[str, ...]


def hidden(kind: Kind, depth: float, rng: np.random.Generator) -> Problem:
    """Draw a problem whose first needle is at a given depth; further needles are at random depths.

    ``niah_single_1`` and ``niah_single_2`` hide one number under one key (in noise and in text). ``niah_multikey_1``
    hides three more under other keys, and asks for the first. ``niah_multivalue`` hides three more under the same key,
    and asks for all.

    Args:
        kind: One of these names.
        depth: Share of the haystack before the first needle, 0..1.
        rng: Draws the keys, the numbers of seven digits and the other depths.

    Raises:
        UserError: If the kind is unknown or the depth out of range.
    """
    if kind not in get_args(Kind):
        raise UserError(f"kind: got {kind!r}, expected one of {', '.join(get_args(Kind))}")
    if not 0 <= depth <= 1:
        raise UserError(f"depth: got {depth}, expected a share of the haystack in 0..1")
    count = 1 if kind.startswith("niah_single") else NEEDLES
    pairs = rng.choice(len(ADJECTIVES) * len(NOUNS), count, replace=False)
    keys = [f"{ADJECTIVES[pair % len(ADJECTIVES)]}-{NOUNS[pair // len(ADJECTIVES)]}" for pair in pairs]
    values = [str(number) for number in rng.choice(9 * 10**6, count, replace=False) + 10**6]
    places = [depth, *rng.random(count - 1)]
    many = kind == "niah_multivalue"
    if many:
        keys = keys[:1] * count
    sentences = [f"One of the special magic numbers for {k} is: {v}." for k, v in zip(keys, values, strict=True)]
    what = "are all the special magic numbers" if many else "is the special magic number"
    answer = "special magic numbers" if many else "special magic number"
    be = "are" if many else "is"
    question = (
        f"What {what} for {keys[0]} mentioned in the provided text? "
        f"The {answer} for {keys[0]} mentioned in the provided text {be}"
    )
    return Problem(tuple(zip(places, sentences, strict=True)), question, tuple(values if many else values[:1]))


def prompt(problem: Problem, length: int, haystack: Sequence[int], encode: Callable[[str], list[int]]) -> list[int]:
    """The tokens of the haystack, the needles and the question, which together with the answer are ``length``.

    Args:
        problem: A problem of `hidden`.
        length: Number of tokens in all, including `ANSWER` for each value.
        haystack: At least ``length`` tokens of noise or text.
        encode: Function from a text to its tokens.

    Raises:
        UserError: If the length leaves no room for the haystack.
    """
    sentences = sorted((place, encode(f"\n{sentence}\n")) for place, sentence in problem.needles)
    question = encode(f"\n{problem.question}")
    room = length - len(question) - sum(len(s) for _, s in sentences) - ANSWER * len(problem.values)
    if room < 1:
        raise UserError(f"lengths: got {length}, of which needles, question and answer take {length - room}; read more")
    assert len(haystack) >= room, "the caller gives as much haystack as there can be"
    made: list[int] = []
    before = 0
    for place, sentence in sentences:
        cut = round(place * room)
        made += [*haystack[before:cut], *sentence]
        before = cut
    return [*made, *haystack[before:room], *question]


def recall(answer: str, values: Sequence[str]) -> float:
    """Share of the values that occur in the answer (RULER's ``string_match_all``)."""
    return sum(value in answer for value in values) / len(values)
