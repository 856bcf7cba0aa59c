import inspect
import re

import numpy as np
import pytest

import kerple.tasks
from kerple.tasks import (
    Addition,
    AssociativeRecall,
    Copy,
    Example,
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
from kerple.tasks.vocabulary import decode, encode
from tests.tasks.checkers import CHECKERS

TASKS = {
    "copy": Copy(),
    "copy, one letter": Copy(repeated=True),
    "reverse": Reverse(),
    "sort": Sort(),
    "addition": Addition(),
    "addition, equal": Addition(equal=True),
    "multiplication": Multiplication(),
    "sum": ModularSum(),
    "parity": Parity(),
    "polynomial": Polynomial(),
    "chain": VariableChain(),
    "passkey": Passkey(),
    "needle": Needle(),
    "needle, of four": Needle(keys=4),
    "recall": AssociativeRecall(),
}


def drawn(task: Task, lengths: range = range(1, 31), each: int = 10) -> list[tuple[int, Example]]:
    rng = np.random.default_rng(0)
    return [(n, task.example(n, rng)) for n in lengths for _ in range(each)]


@pytest.mark.parametrize("name", TASKS)
def test_answers_and_lengths_are_those_of_an_independent_solver(name):
    task = TASKS[name]
    for n, example in drawn(task):
        solve, measure = CHECKERS[task.name]
        assert example.answer == solve(example.prompt, example.answer), example
        assert example.sizes[0] == n == measure(example.prompt)
        assert len(example.sizes) == len(task.axes)
        tokens = example.tokens()
        assert tokens == encode(example.text)
        assert decode(tokens) == example.text
        scored = "".join(c for c, s in zip(example.text[1:], example.scored(), strict=True) if s)
        assert scored == (example.answer[1::2] if name == "recall" else example.answer) + "»"  # its keys are given


def test_every_task_is_checked():
    classes = {value for value in vars(kerple.tasks).values() if inspect.isclass(value) and issubclass(value, Task)}
    assert {type(task) for task in TASKS.values()} == classes - {Task}


@pytest.mark.parametrize("padded", [False, True])
def test_reversed_addition(padded):
    for n, example in drawn(Addition(order="reversed", padded=padded)):
        first, second = example.prompt.split("+")
        assert int(first[::-1]) + int(second[::-1]) == int(example.answer[::-1])
        if padded:
            assert (len(first), len(second), len(example.answer)) == (n, n, n + 1)
        else:
            assert example.answer == str(int(example.answer[::-1]))[::-1]
            assert (len(first), len(second)) == example.sizes[1:]


@pytest.mark.parametrize("padded", [False, True])
def test_reversed_multiplication(padded):
    for n, example in drawn(Multiplication(order="reversed", padded=padded)):
        number, digit = example.prompt.split("*")
        assert example.sizes == (n, int(digit))
        assert int(number[::-1]) * int(digit) == int(example.answer[::-1])
        assert len(example.answer) == n + 1 if padded else example.answer == str(int(example.answer[::-1]))[::-1]


@pytest.mark.parametrize("keys", [1, 3])
def test_needles_lie_where_their_sizes_say_and_each_may_be_asked_for(keys):
    tenths, asked_for = set(), set()
    for _, example in drawn(Needle(keys), range(50, 51), 400):
        haystack, asked = example.prompt.rsplit(";", 1)
        needles = re.findall(r"\[(\w\w):\d{4}\]", haystack)
        assert len(needles) == len(set(needles)) == keys
        before = re.sub(r"\[\w+:\d+\]", "", haystack[: haystack.index(f"[{asked}:")])
        assert example.sizes == (50, 10 * len(before) // 51)
        tenths.add(example.sizes[1])
        asked_for.add(needles.index(asked))
    assert tenths == set(range(10))
    assert asked_for == set(range(keys))


def test_pairs_of_operand_sizes_are_equally_likely():
    sizes = [example.sizes[1:] for _, example in drawn(Addition(), range(4, 5), 7000)]
    pairs = {(a, b) for a in range(1, 5) for b in range(1, 5) if max(a, b) == 4}
    assert set(sizes) == pairs
    assert sum((sizes.count(pair) - 1000) ** 2 / 1000 for pair in pairs) < 22.5  # χ², 6 degrees: p > 0.001


def test_the_same_state_gives_the_same_example():
    for task in TASKS.values():
        first, second = (task.example(7, np.random.default_rng(3)) for _ in range(2))
        assert first == second
        assert first != task.example(7, np.random.default_rng(4)) or task.name == "repeated copy"
