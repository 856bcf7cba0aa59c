import inspect
import re

import numpy as np
import pytest

import kerple.tasks
from kerple.tasks import (
    Addition,
    AssociativeRecall,
    Copy,
    ModularSum,
    Multiplication,
    Needle,
    Parity,
    Passkey,
    Polynomial,
    Reverse,
    Sort,
    Task,
    VariableChain,
)
from kerple.tasks.vocabulary import CHARACTERS, decode, encode
from tests.tasks.checkers import CHECKERS, add_reversed_padded

TASKS = {
    "copy": Copy(),
    "copy, one letter": Copy(repeated=True),
    "reverse": Reverse(),
    "sort": Sort(),
    "sort numbers": Sort(digits=4),
    "addition": Addition(),
    "addition, equal": Addition(equal=True),
    "multiplication": Multiplication(),
    "sum": ModularSum(),
    "parity": Parity(),
    "polynomial": Polynomial(),
    "chain": VariableChain(),
    "chain, in order": VariableChain(shuffled=False),
    "passkey": Passkey(),
    "passkey, letters": Passkey(digits=3, filler="letters"),
    "needle": Needle(),
    "needle, of four, in letters": Needle(keys=4, filler="letters"),
}


def drawn(task: Task, lengths: range = range(1, 31), each: int = 20) -> list[tuple[int, kerple.tasks.Example]]:
    rng = np.random.default_rng(0)
    return [(n, task.example(n, rng)) for n in lengths for _ in range(each)]


@pytest.mark.parametrize("name", TASKS)
def test_answers_and_lengths_are_those_of_an_independent_solver(name: str) -> None:
    task = TASKS[name]
    for n, example in drawn(task):
        solve, measure = CHECKERS[task.name]
        assert example.answer == solve(example.prompt), example
        assert example.sizes[0] == n == measure(example.prompt)
        assert len(example.sizes) == len(task.axes)


def test_every_task_is_checked() -> None:
    classes = {value for value in vars(kerple.tasks).values() if inspect.isclass(value) and issubclass(value, Task)}
    assert {type(task) for task in TASKS.values()} == classes - {
        Task,
        AssociativeRecall,
    }  # which has its own test below


@pytest.mark.parametrize("padded", [False, True])
def test_reversed_addition(padded: bool) -> None:
    for n, example in drawn(Addition(order="reversed", padded=padded)):
        first, second = example.prompt.split("+")
        assert int(first[::-1]) + int(second[::-1]) == int(example.answer[::-1])
        if padded:
            assert len(first) == len(second) == n
            assert example.answer == add_reversed_padded(example.prompt)
        else:
            assert example.answer == str(int(example.answer[::-1]))[::-1]
            assert (len(first), len(second)) == example.sizes[1:]


@pytest.mark.parametrize("padded", [False, True])
def test_reversed_multiplication(padded: bool) -> None:
    for n, example in drawn(Multiplication(order="reversed", padded=padded)):
        number, digit = example.prompt.split("*")
        assert example.sizes == (n, int(digit))
        assert int(number[::-1]) * int(digit) == int(example.answer[::-1])
        assert len(example.answer) == n + 1 if padded else example.answer == str(int(example.answer[::-1]))[::-1]


@pytest.mark.parametrize("keys", [1, 3])
def test_needles_lie_where_their_sizes_say_and_each_may_be_asked_for(keys: int) -> None:
    rng, tenths, asked_for = np.random.default_rng(0), set(), set()
    for _ in range(400):
        example = Needle(keys).example(50, rng)
        haystack, asked = example.prompt.rsplit(";", 1)
        needles = re.findall(r"\[(\w\w):\d{4}\]", haystack)
        assert len(needles) == len(set(needles)) == keys
        before = re.sub(r"\[\w+:\d+\]", "", haystack[: haystack.index(f"[{asked}:")])
        assert example.sizes == (50, 10 * len(before) // 51)
        tenths.add(example.sizes[1])
        asked_for.add(needles.index(asked))
    assert tenths == set(range(10))
    assert asked_for == set(range(keys))


def test_pairs_of_operand_sizes_are_equally_likely() -> None:
    n, draws = 4, 7000
    rng = np.random.default_rng(0)
    found: dict[tuple[int, int], int] = {}
    for _ in range(draws):
        _, a, b = Addition().example(n, rng).sizes
        found[a, b] = found.get((a, b), 0) + 1
    assert set(found) == {(a, b) for a in range(1, 5) for b in range(1, 5) if max(a, b) == 4}
    expected = draws / 7
    assert sum((count - expected) ** 2 / expected for count in found.values()) < 22.5  # χ², 6 degrees: p > 0.001


def test_recall_asks_for_values_by_their_keys() -> None:
    for queries in (None, 1, 3):
        for n, example in drawn(AssociativeRecall(queries), range(1, 53), 3):
            memory = dict(re.findall(r"([a-zA-Z])(\d)", example.prompt))
            asked = re.findall(r"([a-zA-Z])(\d)", example.answer)
            assert len(memory) == n == len(example.prompt) // 2
            assert len(asked) == min(n, queries or n) == len({key for key, _ in asked})
            assert all(memory[key] == value for key, value in asked)
            answer = [s for s, _ in zip(example.scored()[len(example.prompt) + 1 :], example.answer, strict=False)]
            assert answer == [False, True] * len(asked)


@pytest.mark.parametrize("name", TASKS)
def test_sequences_are_made_of_the_characters_and_score_the_answer(name: str) -> None:
    for _, example in drawn(TASKS[name], range(1, 20), 5):
        tokens = example.tokens()
        assert tokens == encode(example.text)
        assert decode(tokens) == example.text
        scored = "".join(c for c, s in zip(example.text[1:], example.scored(), strict=True) if s)
        assert scored == example.answer + "»"


def test_numbers_of_digits_are_equally_likely_and_have_no_leading_zero() -> None:
    _, example = drawn(Sort(digits=3), range(3000, 3001), 1)[0]
    numbers = example.prompt.split(",")
    assert all(number == str(int(number)) for number in numbers)
    counts = np.bincount([len(number) for number in numbers], minlength=4)[1:]
    assert ((counts - 1000) ** 2 / 1000).sum() < 13.8  # χ², 2 degrees: p > 0.001


def test_the_same_state_gives_the_same_example() -> None:
    for task in TASKS.values():
        first, second = (task.example(7, np.random.default_rng(3)) for _ in range(2))
        assert first == second
        assert first != task.example(7, np.random.default_rng(4)) or task.name == "repeated copy"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Copy(symbols=53), "symbols: got 53"),
        (lambda: Sort(digits=19), "digits: got 19"),
        (lambda: Needle(keys=0), "keys: got 0"),
        (lambda: AssociativeRecall(queries=0), "queries: got 0"),
        (lambda: encode("ß"), "the character 'ß'"),
        (lambda: decode([len(CHARACTERS)]), f"got id {len(CHARACTERS)}"),
    ],
)
def test_mistakes_are_named(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
