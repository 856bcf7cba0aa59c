"""What is hidden, where it lies and how an answer is scored."""

import re

import numpy as np
import pytest

from kerple.analyses.haystack import ANSWER, hidden, prompt, recall


def encode(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize(
    ("kind", "sentences", "sought"),
    [("niah_single_1", 1, 1), ("niah_single_2", 1, 1), ("niah_multikey_1", 4, 1), ("niah_multivalue", 4, 4)],
)
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_the_needle_lies_at_its_depth_and_the_rest_is_haystack(kind, sentences, sought, depth) -> None:
    problem = hidden(kind, depth, np.random.default_rng(1))
    tokens = prompt(problem, 900, [0] * 900, encode)
    text = bytes(tokens).decode()
    assert len(tokens) == 900 - ANSWER * sought
    found = re.findall(r"One of the special magic numbers for ([a-z]+-[a-z]+) is: (\d{7})\.", text)
    assert len(found) == sentences
    key = re.search(r"special magic numbers? for (\S+) mentioned", text).group(1)
    assert {value for k, value in found if k == key} == set(problem.values)
    assert len(problem.values) == sought
    room = text.count("\0")
    place = text[: text.index(problem.needles[0][1])].count("\0")
    assert place == round(depth * room)
    assert text.endswith(problem.question)


def test_problems_are_those_of_the_seed() -> None:
    first, second, third = (hidden("niah_multikey_1", 0.5, np.random.default_rng(seed)) for seed in (3, 3, 4))
    assert first == second != third


def test_recall_is_the_share_of_values_that_are_named() -> None:
    assert recall(" 1234567, and 7654321.", ["1234567", "7654321"]) == 1
    assert recall("1234567", ["1234567", "7654321", "1111111", "2222222"]) == 0.25
    assert recall("123456", ["1234567"]) == 0


def test_what_cannot_be_hidden_is_refused() -> None:
    with pytest.raises(ValueError, match="kind: got 'niah', expected one of niah_single_1"):
        hidden("niah", 0.5, np.random.default_rng(0))
    with pytest.raises(ValueError, match="depth: got 2"):
        hidden("niah_single_1", 2, np.random.default_rng(0))
    with pytest.raises(ValueError, match="lengths: got 100, of which needles, question and answer take"):
        prompt(hidden("niah_single_1", 0.5, np.random.default_rng(0)), 100, [0] * 100, encode)
