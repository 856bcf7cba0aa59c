"""`Needle`: retrieval of numbers (needles) that are hidden in a long text (a haystack), by depth and length.

The problems and their names are those of RULER (Hsieh et al. 2024, arXiv 2404.06654, section 3.1).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from kerple.base.errors import require
from kerple.data.evaluation_text import Text
from kerple.measure.measure import (
    Measure,
    length_limit,
    ordered_lengths,
    require_positive,
    skipped_lengths,
    skipped_lines,
)
from kerple.measure.plotting import heat_map, panel
from kerple.measure.result import Result
from kerple.measure.results_table import Row
from kerple.measure.runner import Runner
from kerple.model.network import Network, SupportsGeneration

Kind = Literal["niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multivalue"]
NOISE_SENTENCES = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
ADJECTIVES = ("ancient", "bitter", "clever", "distant", "eager", "famous", "gentle", "hollow", "jolly", "lively")
NOUNS = ("anchor", "basket", "candle", "desert", "engine", "forest", "garden", "hammer", "island", "kettle")
NEEDLES = 4  # number of keys in niah_multikey_1, and of values in niah_multivalue
ANSWER = 16  # number of tokens that the model may generate for each value


@dataclass(frozen=True)
class Problem:
    """Sentences to hide in a haystack, and a question about them.

    Args:
        needles: Pairs of a depth and a sentence. The depth is the fraction of the haystack before the sentence, 0..1.
        question: Text after the haystack, which the model continues.
        values: The numbers that the answer has to contain.
    """

    needles: tuple[tuple[float, str], ...]
    question: str
    values: tuple[str, ...]


def draw_problem(kind: Kind, depth: float, rng: np.random.Generator) -> Problem:
    """Draw a problem with its first needle at a depth, and the other needles at random depths.

    - ``niah_single_1`` and ``niah_single_2`` hide one number, which has a key of two words.
    - ``niah_multikey_1`` hides three more numbers with other keys, and asks for the first number.
    - ``niah_multivalue`` hides three more numbers with the same key, and asks for all four.

    Args:
        kind: One of these names.
        depth: Fraction of the haystack before the first needle, 0..1.
        rng: Random generator for the keys, the numbers (of seven digits) and the other depths.
    """
    multivalue = kind == "niah_multivalue"
    count = 1 if kind.startswith("niah_single") else NEEDLES
    pairs = rng.choice(len(ADJECTIVES) * len(NOUNS), count, replace=False)
    keys = [f"{ADJECTIVES[pair % len(ADJECTIVES)]}-{NOUNS[pair // len(ADJECTIVES)]}" for pair in pairs]
    values = [str(number) for number in rng.choice(9 * 10**6, count, replace=False) + 10**6]
    depths = [depth, *rng.random(count - 1)]
    if multivalue:
        keys = keys[:1] * count
    sentences = [f"One of the special magic numbers for {k} is: {v}." for k, v in zip(keys, values, strict=True)]
    verb, article, number = ("are", "all the", "numbers") if multivalue else ("is", "the", "number")
    subject = f"special magic {number} for {keys[0]} mentioned in the provided text"
    question = f"What {verb} {article} {subject}? The {subject} {verb}"
    return Problem(tuple(zip(depths, sentences, strict=True)), question, tuple(values if multivalue else values[:1]))


def problem_tokens(
    problem: Problem, length: int, haystack: Sequence[int], encode: Callable[[str], list[int]]
) -> list[int]:
    """Insert the needles into the haystack, append the question, and return all tokens.

    Args:
        problem: A problem of `draw_problem`.
        length: Number of returned tokens plus the tokens of the answer, `ANSWER` for each value.
        haystack: At least ``length`` tokens of noise or text.
        encode: Function that returns the tokens of a string.

    Raises:
        UserError: If no tokens are left for the haystack.
    """
    sentences = sorted((depth, encode(f"\n{sentence}\n")) for depth, sentence in problem.needles)
    question = encode(f"\n{problem.question}")
    haystack_size = length - len(question) - sum(len(s) for _, s in sentences) - ANSWER * len(problem.values)
    needed = f"{length - haystack_size}, the tokens of needles, question and answer"
    require(haystack_size >= 1, "Needle: lengths", length, f"more than {needed}; use larger lengths")
    tokens = list(haystack[:haystack_size])
    for depth, sentence in reversed(sentences):  # from last to first, because an insertion moves later tokens
        start = round(depth * haystack_size)
        tokens[start:start] = sentence
    return tokens + question


@dataclass
class Needle(Measure):
    """Measures the recall of numbers that are hidden in a text, at each depth and length.

    The model generates an answer greedily. Its recall is the fraction of the requested numbers that the answer
    contains. Only ``niah_multivalue`` requests more than one number.

    The haystack is noise (five sentences, repeated) for ``niah_single_1``, and the text itself for the other problems.

    The result has ``<kind>.csv`` (length, depth, problems, recall), a heat map ``<kind>.png``, and the metric
    ``accuracy`` (the mean recall) at each length. The text must have a tokenizer. Lengths that the network cannot read
    are skipped.

    Args:
        kind: ``niah_single_1``, ``niah_single_2``, ``niah_multikey_1`` or ``niah_multivalue``, see `draw_problem`.
        lengths: Numbers of tokens. A length counts haystack, needles, question and answer.
        depths: Depths of the requested needle: fractions of the haystack before it, 0..1. With ``niah_multivalue``,
            the depths of the first of four needles.
        problems: Number of problems at each depth and length.
        seed: Seed of the keys, the numbers, the depths of the other needles, and the start of the haystack in the text.
            Models get the same problems if they have the same text and tokenizer.

    Raises:
        UserError: If an option is out of range, or the text has no tokenizer or is too short.
    """

    kind: Kind = "niah_single_1"
    lengths: Sequence[int] = (256, 512, 1024)
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0)
    problems: int = 4
    seed: int = 1235

    needs: ClassVar[tuple[type, ...]] = (SupportsGeneration,)

    def __post_init__(self) -> None:
        require_positive(self, "problems")
        require(self.seed >= 0, "Needle: seed", self.seed, "0 or more")
        self.lengths = ordered_lengths(self)
        valid = bool(self.depths) and all(0 <= depth <= 1 for depth in self.depths)
        require(valid, "Needle: depths", list(self.depths), "fractions from 0 to 1")
        self.depths = sorted(set(self.depths))

    @property
    def name(self) -> str:  # type: ignore[override]
        """Kind of problem, which names files and results."""
        return self.kind

    @property
    def haystack(self) -> str:
        """Kind of haystack: ``noise``, or ``corpus`` for the text itself."""
        return "noise" if self.kind == "niah_single_1" else "corpus"

    def check(self, network: Network, text: Any) -> None:
        super().check(network, text)
        _ = text.tokenizer  # raises an error if the text has none
        longest, tokens = self.lengths[-1], len(text.stream)
        expected = f"less than {tokens}, the number of tokens in {text.name}; use shorter lengths"
        require(self.haystack != "corpus" or longest < tokens, "Needle: lengths", longest, expected)
        for depth, number in product(self.depths, range(self.problems)):
            self._draw(text, self.lengths[0], depth, number)  # raises an error if the length is too short

    def measure(self, network: Any, text: Text, runner: Runner) -> Result:
        lengths = [length for length in self.lengths if length <= length_limit(network)]
        cells = list(product(range(len(lengths)), range(len(self.depths)), range(self.problems)))
        recalls = torch.zeros(len(lengths), len(self.depths), dtype=torch.float64, device=runner.device)
        for _, (i, d, number) in runner.part(cells):
            with runner.autocast():
                recalls[i, d] += self._recall(text, network, lengths[i], self.depths[d], number, runner.device)
        recalls = runner.sum(recalls) / self.problems
        values = zip(product(lengths, self.depths), recalls.flatten().tolist(), strict=True)
        rows = [{"length": n, "depth": d, "problems": self.problems, "recall": value} for (n, d), value in values]
        title = f"{network.name}: {self.kind} in {self.haystack}"
        count = self.problems * len(self.depths)
        figures = {self.name: _figure(recalls, lengths, self.depths, title)} if lengths else {}
        totals = zip(lengths, (recalls.mean(1) * count).tolist(), strict=True)
        sums = [Row("accuracy", self.kind, length, None, None, total, count) for length, total in totals]
        about: dict[str, Any] = {"haystack": self.haystack}
        about["skipped"] = skipped_lengths(self.lengths, network, self.kind)
        lines = [f"{self.kind} at {row.length:,}: recall {row.sum / count:.0%} in {count} problems" for row in sums]
        report = "\n".join([*lines, *skipped_lines(about["skipped"])])
        return Result(self.name, {self.name: rows}, figures, sums, about, report=report)

    def _draw(self, text: Text, length: int, depth: float, number: int) -> tuple[Problem, list[int]]:
        """Return problem ``number`` of a length and depth, and its tokens without those of the answer."""
        # the seed determines the problem, so that the problem does not depend on the number of processes
        rng = np.random.default_rng([self.seed, length, round(depth * 10**6), number])
        problem = draw_problem(self.kind, depth, rng)
        if self.haystack == "noise":
            sentences = text.encode(NOISE_SENTENCES)
            haystack = sentences * -(-length // len(sentences))
        else:
            start = int(rng.integers(len(text.stream) - length))
            haystack = text.stream[start : start + length].tolist()
        return problem, problem_tokens(problem, length, haystack, text.encode)

    def _recall(self, text: Text, network: Any, length: int, depth: float, number: int, device: torch.device) -> float:
        """Return the recall of the network on problem ``number`` of a length and depth.

        The recall is the fraction of the values that occur in the answer (``string_match_all`` of RULER).
        """
        problem, tokens = self._draw(text, length, depth, number)
        answer = text.decode(network.continued(torch.tensor([tokens], device=device), ANSWER * len(problem.values)))
        return sum(value in answer for value in problem.values) / len(problem.values)


def _figure(recalls: Tensor, lengths: Sequence[int], depths: Sequence[float], title: str) -> Figure:
    """Draw the mean recalls, (lengths, depths), as a heat map."""
    figure, axes = panel(1.6 + 0.9 * len(lengths), 1.6 + 0.5 * len(depths))
    figure.colorbar(heat_map(axes, recalls.T, ".0%", cmap="RdYlGn", vmin=0, vmax=1), label="recall")
    axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
    axes.set_yticks(range(len(depths)), [f"{d:.0%}" for d in depths])
    axes.set(xlabel="length (tokens)", ylabel="depth of the needle")
    figure.suptitle(title, fontsize=10)
    return figure
