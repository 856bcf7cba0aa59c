"""Solvers that read a problem as text and know nothing of how it was made: the oracle of the generators."""

import re
from collections.abc import Callable
from fractions import Fraction


def copy(prompt: str) -> str:
    out = ""
    for character in prompt:
        out += character
    return out


def reverse(prompt: str) -> str:
    out = ""
    for character in prompt:
        out = character + out
    return out


def sort_letters(prompt: str) -> str:
    alphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return "".join(letter * prompt.count(letter) for letter in alphabet)


def sort_numbers(prompt: str) -> str:
    numbers = [int(text) for text in prompt.split(",")]
    placed: list[int] = []
    for number in numbers:  # insertion sort; the generator uses the built-in one
        at = sum(other <= number for other in placed)
        placed.insert(at, number)
    return ",".join(str(number) for number in placed)


def add(prompt: str) -> str:
    first, second = prompt.split("+")
    return str(int(first) + int(second))


def add_reversed_padded(prompt: str) -> str:
    first, second = (text[::-1] for text in prompt.split("+"))
    return str(int(first) + int(second)).zfill(len(first) + 1)[::-1]


def multiply(prompt: str) -> str:
    number, digit = prompt.split("*")
    total = 0
    for _ in range(int(digit)):
        total += int(number)
    return str(total)


def sum_modulo(prompt: str) -> str:
    return str(eval(prompt) % 10)


def parity(prompt: str) -> str:
    return "1" if prompt.replace("0", "").count("1") % 2 else "0"


def polynomial(prompt: str) -> str:
    point, terms = prompt.split(":")
    value = Fraction(0)
    for coefficient, degree in re.findall(r"([+-]?\d+)\*x\^(\d+)", terms):
        power = Fraction(1)
        for _ in range(int(degree)):
            power *= int(point)
        value += int(coefficient) * power
    return str(int(value) % 10)


def chain(prompt: str) -> str:
    clauses, asked = prompt.split(";")
    definitions = {}
    for clause in clauses.split(","):
        name, sign, source = re.fullmatch(r"(\w)=([+-])(\w)", clause).groups()
        assert name not in definitions
        definitions[name] = (sign, source)
    minuses = 0
    while asked != "1":
        sign, asked = definitions[asked]
        minuses += sign == "-"
    return "-" if minuses % 2 else "+"


def needle(prompt: str) -> str:
    haystack, asked = prompt.rsplit(";", 1)
    (value,) = [value for key, value in re.findall(r"\[(\w+):(\d+)\]", haystack) if key == asked]
    return value


def passkey(prompt: str) -> str:
    (key,) = re.findall(r"\[(\d+)\]", prompt)
    return key


SOLVERS: dict[str, Callable[[str], str]] = {
    "copy": copy,
    "repeated copy": copy,
    "reverse": reverse,
    "sort": sort_letters,
    "sort numbers": sort_numbers,
    "addition": add,
    "multiplication": multiply,
    "modular sum": sum_modulo,
    "parity": parity,
    "polynomial": polynomial,
    "variable chain": chain,
    "passkey": passkey,
    "needle": needle,
    "multi-key needle": needle,
}


def length(name: str, prompt: str) -> int:
    """The length of a problem, read from its text."""
    if name in ("copy", "repeated copy", "reverse", "sort", "parity"):
        return len(prompt)
    if name == "addition":
        return max(map(len, prompt.split("+")))
    if name == "multiplication":
        return prompt.index("*")
    if name == "sort numbers":
        return len(prompt.split(","))
    if name == "modular sum":
        return len(prompt.split("+"))
    if name == "polynomial":
        return prompt.count("x")
    if name == "variable chain":
        return prompt.count("=")
    if name in ("needle", "multi-key needle"):
        return len(re.sub(r"\[\w+:\d+\]", "", prompt.rsplit(";", 1)[0]))
    if name == "passkey":
        return len(re.sub(r"\[\d+\]", "", prompt))
    if name == "associative recall":
        return len(prompt) // 2
    raise AssertionError(name)
