"""`VariableChain`: variables that are defined by one another, in a chain."""

from typing import ClassVar

import numpy as np

from kerple.tasks.base import Example, Task
from kerple.tasks.vocabulary import LETTERS


class VariableChain(Task):
    """Follow signs along a chain of variables, as LEGO asks (Zhang et al. 2022, arXiv 2206.04301): ``b=-a,a=+1;b=-``.

    The length is the number of clauses, each of which defines one letter. One clause starts the chain with ``+1`` or
    ``-1``; every other one gives a variable the sign of another or its opposite. The question is for a random variable,
    whose depth is the number of clauses to follow. The scratchpad has the signs from the start of the chain to the
    variable: ``b=-a,a=+1;b=a+b->-``.

    Args:
        shuffled: Whether the clauses are in random order; else they are in that of the chain.
        scratchpad: Whether the steps are written before the answer.
    """

    axes: ClassVar[tuple[str, ...]] = ("length", "depth")
    longest = len(LETTERS)

    def __init__(self, shuffled: bool = True, scratchpad: bool = False) -> None:
        self.shuffled, self.scratchpad = shuffled, scratchpad

    def example(self, length: int, rng: np.random.Generator) -> Example:
        names = [LETTERS[i] for i in rng.permutation(len(LETTERS))[:length].tolist()]
        flips = rng.integers(2, size=length)
        signs = ["-" if odd else "+" for odd in (np.cumsum(flips) % 2).tolist()]
        clauses = [
            f"{name}={'-' if flip else '+'}{source}"
            for name, flip, source in zip(names, flips.tolist(), ["1", *names], strict=False)
        ]
        order = rng.permutation(length).tolist() if self.shuffled else range(length)
        asked = int(rng.integers(length))
        steps = "".join(name + sign for name, sign in zip(names[: asked + 1], signs, strict=False))
        prompt = ",".join(clauses[i] for i in order) + f";{names[asked]}"
        return Example(prompt, signs[asked], (length, asked + 1), steps if self.scratchpad else "")
