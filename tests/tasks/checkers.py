"""Solvers that read a problem as text and know nothing of how it was made: the oracle of the generators."""

import re
from collections.abc import Callable


def sort(prompt: str) -> str:
    alphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return "".join(letter * prompt.count(letter) for letter in alphabet)


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
    (value,) = [value for key, value in re.findall(r"\[(\w+):(\d+)\]", haystack) if key == wanted]
    return value


def recall(prompt: str, answer: str) -> str:
    memory, keys = dict(re.findall(r"([a-zA-Z])(\d)", prompt)), answer[::2]
    assert sorted(keys) == sorted(memory)  # each is asked for once
    return "".join(key + memory[key] for key in keys)


def alone(solve: Callable[[str], str]) -> Callable[[str, str], str]:
    """A solver that needs no part of the answer to know what is asked for."""
    return lambda prompt, _: solve(prompt)


Checker = tuple[Callable[[str, str], str], Callable[[str], int]]
CHECKERS: dict[str, Checker] = {  # the answer, and the length of a problem
    "copy": (alone(str), len),
    "repeated copy": (alone(str), len),
    "reverse": (alone(lambda prompt: "".join(reversed(prompt))), len),
    "sort": (alone(sort), len),
    "addition": (
        alone(lambda prompt: str(sum(map(int, prompt.split("+"))))),
        lambda prompt: max(map(len, prompt.split("+"))),
    ),
    "multiplication": (alone(multiply), lambda prompt: prompt.index("*")),
    "modular sum": (alone(lambda prompt: str(eval(prompt) % 10)), lambda prompt: len(prompt.split("+"))),
    "parity": (alone(lambda prompt: "1" if prompt.count("1") % 2 else "0"), len),
    "polynomial": (alone(polynomial), lambda prompt: prompt.count("x")),
    "variable chain": (alone(chain), lambda prompt: prompt.count("=")),
    "passkey": (
        alone(lambda prompt: re.search(r"\[(\d{5})\]", prompt)[1]),
        lambda prompt: len(re.sub(r"\[\d+\]", "", prompt)),
    ),
    "associative recall": (recall, lambda prompt: len(prompt) // 2),
} | dict.fromkeys(
    ("needle", "multi-key needle"),
    (alone(needle), lambda prompt: len(re.sub(r"\[\w+:\d+\]", "", prompt.rsplit(";", 1)[0]))),
)
