import inspect
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kerple import tasks
from kerple.base.errors import UserError
from kerple.tasks import Addition, Example, Multiplication, NeedleInFiller, Task, TaskData
from kerple.tasks.sampling import Sampler
from kerple.tasks.token_places import abacus
from kerple.tasks.vocabulary import CHARACTERS, PAD_ID, characters_to_ids, ids_to_characters

TASKS = {
    "copy": tasks.Copy(), "copy, one letter": tasks.Copy(repeated=True), "reverse": tasks.Reverse(),
    "sort": tasks.Sort(), "addition": Addition(), "addition, equal": Addition(equal=True),
    "multiplication": Multiplication(), "sum": tasks.ModularSum(), "parity": tasks.Parity(),
    "polynomial": tasks.Polynomial(), "chain": tasks.VariableChain(), "passkey": tasks.Passkey(),
    "needle": NeedleInFiller(), "needle, of four": NeedleInFiller(keys=4), "recall": tasks.AssociativeRecall(),
}  # fmt: skip


# independent solvers, whose input is the text of a problem
def sort(prompt: str) -> str:
    return "".join(letter * prompt.count(letter) for letter in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


def multiply(prompt: str) -> str:
    number, digit = prompt.split("*")
    return str(sum(int(number) for _ in range(int(digit))))


def polynomial(prompt: str) -> str:
    point, terms = prompt.split(":")
    return str(eval(terms.replace("^", "**"), {"x": int(point)}) % 10)


def chain(prompt: str) -> str:
    clauses, variable = prompt.split(";")
    definitions = {}
    for clause in clauses.split(","):
        name, sign, source = re.fullmatch(r"(\w)=([+-])(\w)", clause).groups()
        assert name not in definitions
        definitions[name] = (sign, source)
    minuses = 0
    while variable != "1":
        sign, variable = definitions[variable]
        minuses += sign == "-"
    return "-" if minuses % 2 else "+"


def needle(prompt: str) -> str:
    haystack, wanted = prompt.rsplit(";", 1)
    return dict(re.findall(r"\[(\w+):(\d+)\]", haystack))[wanted]


def recall(prompt: str, keys: str) -> str:
    memory = dict(re.findall(r"([a-zA-Z])(\d)", prompt))
    assert sorted(keys) == sorted(memory)  # each key occurs once
    return "".join(key + memory[key] for key in keys)


SOLVERS: dict[str, tuple[Callable[..., str], Callable[[str], int]]] = {  # the answer, and the length of a problem
    "copy": (str, len),
    "repeated copy": (str, len),
    "reverse": (lambda prompt: prompt[::-1], len),
    "sort": (sort, len),
    "addition": (lambda p: str(sum(map(int, p.split("+")))), lambda p: max(map(len, p.split("+")))),
    "multiplication": (multiply, lambda prompt: prompt.index("*")),
    "modular sum": (lambda prompt: str(eval(prompt) % 10), lambda prompt: len(prompt.split("+"))),
    "parity": (lambda prompt: str(prompt.count("1") % 2), len),
    "polynomial": (polynomial, lambda prompt: prompt.count("x")),
    "variable chain": (chain, lambda prompt: prompt.count("=")),
    "passkey": (lambda p: re.search(r"\[(\d{5})\]", p)[1], lambda p: len(re.sub(r"\[\d+\]", "", p))),
    "associative recall": (recall, lambda prompt: len(prompt) // 2),
    "needle": (needle, lambda p: len(re.sub(r"\[\w+:\d+\]|;\w+$", "", p))),
}
SOLVERS["multi-key needle"] = SOLVERS["needle"]


def drawn(task: Task, lengths: range = range(1, 31), each: int = 10) -> list[tuple[int, Example]]:
    rng = np.random.default_rng(0)
    return [(n, task.example(n, rng)) for n in lengths for _ in range(each)]


def test_the_longest_numbers_of_arithmetic_can_be_written():
    for task in (Addition(), Multiplication()):
        assert len(task.example(task.longest, np.random.default_rng(0)).answer) >= task.longest
    with pytest.raises(UserError, match=r"data\.test_lengths: got 4300, expected at most 4299 for addition"):
        TaskData(Addition(), length=9999, train_length=2, test_lengths=[4300])


def test_large_seeds_have_different_problems():
    for seeds in ((0, 2**63), (2**63, 2**63 + 1), (0, 2**64 - 1)):
        first, second = (Sampler(tasks.Copy(), 8, 0.1).draw("train", seed, 0, 8) for seed in seeds)
        assert first != second


@pytest.mark.parametrize("name", TASKS)
def test_problems_are_reproducible_and_have_the_answers_and_lengths_of_independent_solvers(name):
    task = TASKS[name]
    assert drawn(task) == drawn(task)
    first, second = (task.example(7, np.random.default_rng(seed)) for seed in (3, 4))
    assert first != second or name == "repeated copy"
    for n, example in drawn(task):
        solve, measure = SOLVERS[task.name]
        keys = [example.answer[::2]] if name == "recall" else []  # the keys are part of the input
        assert example.answer == solve(example.prompt, *keys), example
        assert example.sizes[0] == n == measure(example.prompt)
        assert len(example.sizes) == len(task.axes)
        tokens = example.tokens()
        assert tokens == characters_to_ids(example.text)
        assert ids_to_characters(tokens) == example.text
        scored = "".join(c for c, s in zip(example.text[1:], example.scored(), strict=True) if s)
        assert scored == (example.answer[1::2] if name == "recall" else example.answer) + "»"


def test_every_task_is_checked():
    classes = {value for value in vars(tasks).values() if inspect.isclass(value) and issubclass(value, Task)}
    assert {type(task) for task in TASKS.values()} == classes - {Task}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("task", "sign"), [(Addition, "+"), (Multiplication, "*")])
def test_reversed_numbers_have_the_right_answers_and_sizes(task, sign, padded):
    for n, example in drawn(task(order="reversed", padded=padded)):
        first, second = example.prompt.split(sign)
        result = eval(f"{int(first[::-1])} {sign} {int(second[::-1])}")
        assert int(example.answer[::-1]) == result
        assert len(example.answer) == (n + 1 if padded else len(str(result)))
        if task is Multiplication:
            assert example.sizes == (len(first), int(second))
        else:
            assert (len(first), len(second)) == ((n, n) if padded else example.sizes[1:])


@pytest.mark.parametrize("keys", [1, 3])
def test_needles_have_the_offset_of_their_sizes_and_each_can_be_the_target(keys):
    tenths, asked_for = set(), set()
    for _, example in drawn(NeedleInFiller(keys), range(50, 51), 400):
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


PLACED: dict[str, Task] = {
    "addition": Addition(order="reversed", equal=True),
    "addition, padded": Addition(order="reversed", padded=True),
    "multiplication": Multiplication(order="reversed"),
    "copy": tasks.Copy(),
    "reverse": tasks.Reverse(),
}
PLACES = {name: task.places for name, task in PLACED.items()} | {"abacus": abacus}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        # 321 + 54 = 375, least significant digits first: digits of equal significance have the same place
        ("addition", "«123+45=573»", [0, 2, 3, 4, 1, 2, 3, 1, 2, 3, 4, 0]),
        ("addition, padded", "«12+90=120··", [0, 2, 3, 4, 2, 3, 1, 2, 3, 4, 0, 0]),  # + has the place of a third digit
        ("multiplication", "«63*7=252", [0, 2, 3, 1, 0, 1, 2, 3, 4]),
        ("copy", "«cab=cab", [0, 2, 3, 4, 1, 2, 3, 4]),
        ("reverse", "«cab=bac»", [0, 2, 3, 4, 5, 4, 3, 2, 0]),
        ("abacus", "«-2:3*x^2-10*x^345=07··", [0, 0, 1, 0, 1, 0, 0, 0, 1, 0, 1, 2, 0, 0, 0, 1, 2, 3, 0, 1, 2, 0, 0]),
    ],
)
def test_places_of_examples(name, text, expected):
    assert PLACES[name](torch.tensor([characters_to_ids(text)]))[0].tolist() == expected


@pytest.mark.parametrize("name", PLACES)
def test_places_are_causal(name):
    """For random tokens, the places of a prefix are the prefix of the places."""
    generator, rng = torch.Generator().manual_seed(0), np.random.default_rng(0)
    random = torch.randint(len(CHARACTERS), (200, 24), generator=generator)
    written = [characters_to_ids(PLACED.get(name, Addition()).example(4, rng).text) for _ in range(50)]
    longest = max(map(len, written))
    padded = torch.tensor([ids + [PAD_ID] * (longest - len(ids)) for ids in written])
    for tokens in (random, padded):
        whole = PLACES[name](tokens)
        assert whole.dtype == torch.int64
        assert 0 <= int(whole.min()) <= int(whole.max()) <= tokens.shape[1] + 1
        for end in range(1, tokens.shape[1]):
            torch.testing.assert_close(PLACES[name](tokens[:, :end]), whole[:, :end])
            changed = torch.cat([tokens[:, :end], random[: len(tokens), : tokens.shape[1] - end]], 1)
            torch.testing.assert_close(PLACES[name](changed)[:, :end], whole[:, :end])


def test_tasks_without_places_are_refused():
    with pytest.raises(UserError, match="order: got plain, expected reversed"):
        TaskData(Addition(), 999).places("coupled")
    with pytest.raises(UserError, match="got 'copy', expected a task with numbers"):
        TaskData(tasks.Copy(), 60).places("abacus")
    for task in (Addition(), Multiplication(), tasks.ModularSum(), tasks.Parity(), tasks.Polynomial()):
        assert TaskData(task, 999).places("abacus") is abacus


def test_places_that_depend_on_later_tokens_are_refused():
    class FromTheRight(Addition):
        """Places that are counted from the end of a number, which is not known during generation."""

        def places(self, tokens: torch.Tensor) -> torch.Tensor:
            return abacus(tokens.flip(1)).flip(1)

    with pytest.raises(UserError, match="got 'from the right', whose method `places` changes places when"):
        TaskData(FromTheRight(), 64).places("coupled")
