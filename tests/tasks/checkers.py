"""Solvers that read a problem as text and know nothing of how it was made: the oracle of the generators."""

import re
from collections.abc import Callable


def sort_letters(prompt: str) -> str:
    alphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return "".join(letter * prompt.count(letter) for letter in alphabet)


def sort_numbers(prompt: str) -> str:
    numbers: list[int] = []
    for number in map(int, prompt.split(",")):  # insertion sort; the generator uses the built-in one
        numbers.insert(sum(other <= number for other in numbers), number)
    return ",".join(map(str, numbers))


def add_reversed_padded(prompt: str) -> str:
    first, second = (text[::-1] for text in prompt.split("+"))
    return str(int(first) + int(second)).zfill(len(first) + 1)[::-1]


def multiply(prompt: str) -> str:
    number, digit = prompt.split("*")
    return str(sum(int(number) for _ in range(int(digit))))


def parity(prompt: str) -> str:
    return "1" if prompt.count("1") % 2 else "0"


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


def passkey(prompt: str) -> str:
    (key,) = re.findall(r"\[(\d+)\]", prompt)
    return key


def needle_length(prompt: str) -> int:
    return len(re.sub(r"\[\w+:\d+\]", "", prompt.rsplit(";", 1)[0]))


CHECKERS: dict[str, tuple[Callable[[str], str], Callable[[str], int]]] = {  # the answer, and the length of a problem
    "copy": (str, len),
    "repeated copy": (str, len),
    "reverse": (lambda prompt: "".join(reversed(prompt)), len),
    "sort": (sort_letters, len),
    "sort numbers": (sort_numbers, lambda prompt: len(prompt.split(","))),
    "addition": (lambda prompt: str(sum(map(int, prompt.split("+")))), lambda prompt: max(map(len, prompt.split("+")))),
    "multiplication": (multiply, lambda prompt: prompt.index("*")),
    "modular sum": (lambda prompt: str(eval(prompt) % 10), lambda prompt: len(prompt.split("+"))),
    "parity": (parity, len),
    "polynomial": (polynomial, lambda prompt: prompt.count("x")),
    "variable chain": (chain, lambda prompt: prompt.count("=")),
    "passkey": (passkey, lambda prompt: len(re.sub(r"\[\d+\]", "", prompt))),
    "needle": (needle, needle_length),
    "multi-key needle": (needle, needle_length),
}
