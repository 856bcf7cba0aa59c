"""The committed numbers of a tier, as values that statements compare."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kerple.compare.runs import Runs, committed, read
from kerple.compare.statistics import by_block


class Untested(LookupError):
    """The numbers a claim needs are not among the results; the message says which."""


@dataclass(frozen=True)
class Value:
    """What was measured of one strategy.

    Args:
        of_seed: A number for each seed.
        blocks: Where the number is a mean over blocks of text: sums and counts, (seeds, blocks) each.
        shown: The file that has it.
    """

    of_seed: pd.Series
    shown: str
    blocks: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None


@dataclass(frozen=True)
class Tier:
    """Comparisons that were trained alike.

    Args:
        root: Folder of the comparisons' folders.
        name: Of the tier.
        comparisons: Folders, in the order in which a strategy is looked for.
        trained: Training length.
        what: What its runs are.
        why: When it is the better test of a claim, why.
        unit: Unit of the lengths.
    """

    root: Path
    name: str
    comparisons: list[str]
    trained: int
    what: str
    why: str
    unit: str = "tokens"

    @property
    def there(self) -> bool:
        """Whether any of its comparisons is committed."""
        return any((self.root / name).is_dir() for name in self.comparisons)

    @cached_property
    def comparison_of(self) -> dict[str, str]:
        """The first comparison that has a run of a strategy, by strategy."""
        return {run.strategy: name for name in self.comparisons[::-1] for run in committed(self.root / name)}

    @cached_property
    def runs(self) -> Runs:
        """The runs of all its comparisons; one that is in several is that of the first."""
        runs = {}
        for name in self.comparisons[::-1]:
            runs |= {(run.part, run.strategy, run.seed): run for run in committed(self.root / name)}
        empty = pd.DataFrame(columns=["strategy", "seed", "metric", "protocol", "length", "block", "sum", "count"])
        return read(runs.values()) if runs else Runs(empty, empty, empty)

    @cached_property
    def blocks(self) -> dict[tuple[str, str, str, int], pd.DataFrame]:
        """Sums by block of text, by strategy, metric, protocol and length."""
        return dict(iter(self.runs.blocks.groupby(["strategy", "metric", "protocol", "length"])))

    def rows(self, strategy: str, *names: str) -> tuple[pd.DataFrame, str]:
        """Rows of a strategy in the first of some tables that has any, and the page that shows them.

        Raises:
            Untested: If none has.
        """
        for name in names:
            file = self.root / self.comparisons[0] / f"{name}.csv"  # of costs, which are of no run
            tables = {"results": self.runs.results, "costs": self.runs.costs, **self.runs.analyses}
            table = pd.read_csv(file) if name == "costs" and file.exists() else tables.get(name)
            if table is not None and len(rows := table[table["strategy"] == strategy]):
                return rows, f"{self.comparison_of.get(strategy, self.comparisons[0])}/table.md"
        raise Untested(f"no {strategy} in {' or '.join(names)} of {', '.join(self.comparisons)}")

    @cached_property
    def lengths(self) -> list[int]:
        """Evaluation lengths in full."""
        results = self.runs.results
        return sorted(int(n) for n in results["length"][results["protocol"] == "full"].unique())

    def losses(self, strategy: str, protocol: str, length: int) -> Value:
        """Mean loss in nats, by seed and by block of text.

        Raises:
            Untested: If it was not measured.
        """
        rows, page = self.rows(strategy, "results")
        rows = rows[(rows["metric"] == "ppl") & rows["protocol"].str.startswith(protocol) & (rows["length"] == length)]
        if rows.empty:
            raise Untested(f"{page} has no {protocol} of {strategy} at {length}")
        rows = rows[rows["protocol"] == rows["protocol"].iloc[0]].sort_values("seed")
        values = rows.set_index("seed")["value"]
        blocks = self.blocks.get((strategy, "ppl", rows["protocol"].iloc[0], length))
        return Value(np.log(values), page, None if blocks is None else by_block(blocks, values.index))


def _length(tier: Tier, key: str) -> int:
    if key == "longest":
        return max(tier.lengths)
    return tier.trained * int(key[:-1]) if key.endswith("x") else int(key)


def perplexity(protocol: str) -> Callable[[Tier, str, str], Value]:
    """Mean loss by a protocol, at a length."""
    return lambda tier, strategy, key: tier.losses(strategy, protocol, _length(tier, key))


def position(which: str) -> Callable[[Tier, str, str], Value]:
    """Mean loss over positions of a long segment, in full or with the window; the key is a range of them."""

    def measure(tier: Tier, strategy: str, key: str) -> Value:
        rows, path = tier.rows(strategy, "context_gain", "position_wise")
        start, end = key.split("..")
        low, high = _length(tier, start), _length(tier, end) if end else math.inf
        width = np.diff(np.sort(rows["first"].unique())).min()
        if rows["first"].max() + width < (high if end else low + 1):
            raise Untested(f"{path} does not reach {key} of {strategy}")
        rows = rows[(rows["first"] >= low) & (rows["first"] < high)]
        if "nll_full" in rows:
            loss = rows[f"nll_{which}"] / rows["targets"]
        else:
            loss = rows["loss"] + (rows["gain"] if which == "windowed" else 0)
        return Value(loss.groupby(rows["seed"]).mean(), path)

    return measure


def head(tier: Tier, strategy: str, key: str) -> Value:
    """The factor that the bias puts on a key's weight at the longest distance, the second largest of all heads."""
    rows, path = tier.rows(strategy, "kernels")
    far = rows[rows["distance"] == rows["distance"].max()]
    return Value(far.groupby("seed")["bias"].agg(lambda bias: math.exp(bias.nlargest(2).iloc[-1])), path)


def shift(tier: Tier, strategy: str, key: str) -> Value:
    """Mean loss of the same segments, started later by the key's positions."""
    rows, path = tier.rows(strategy, "shift")
    rows = rows[rows["shift"] == (rows["shift"].max() if key == "longest" else int(key))]
    if rows.empty:
        raise Untested(f"{path} has no shift of {key} of {strategy}")
    return Value(np.log(rows.set_index("seed")["ppl"]).sort_index(), path)


def term(tier: Tier, strategy: str, key: str) -> Value:
    """Logarithm of the standard deviation of one part of the scores, mean over heads."""
    rows, path = tier.rows(strategy, "four_terms")
    rows = rows[rows["term"] == key]
    return Value(np.log(rows.groupby("seed")["standard_deviation"].mean()), path)


def speed(tier: Tier, strategy: str, key: str) -> Value:
    """Logarithm of the tokens per second in training."""
    rows, path = tier.rows(strategy, "costs")
    return Value(np.log(rows.set_index("seed")["tokens_per_second"]).sort_index(), path)


def exact_match(tier: Tier, strategy: str, key: str) -> Value:
    """Share of exact answers; the key is a task and a length, or a task alone: the mean of lengths beyond training."""
    task, _, length = key.partition(", ")
    rows, path = tier.rows(strategy, "results")
    rows = rows[(rows["metric"] == "exact_match") & (rows["protocol"] == task)]
    rows = rows[rows["length"] == int(length) if length else rows["length"] > tier.trained]
    if rows.empty:
        raise Untested(f"{path} has no {key} of {strategy}")
    return Value(rows.groupby("seed")["value"].mean(), path)


def reach(tier: Tier, strategy: str, key: str) -> Value:
    """Tokens beyond the key's length to which perplexity is within 5% of its own there, at most the longest length.

    Between two lengths, along the straight line in log2 of the length.
    """
    start = _length(tier, key)
    lengths = [n for n in tier.lengths if n >= start]
    if not lengths:
        raise Untested(f"no length of {key} or more in the results")
    found = [tier.losses(strategy, "full", n) for n in lengths]
    curves, reached = pd.concat([value.of_seed for value in found], axis=1, keys=lengths), {}
    for seed, curve in curves.iterrows():
        relative, end = np.exp(curve - curve[start]).tolist(), float(lengths[-1])
        for i in range(1, len(lengths)):
            if relative[i] > 1.05:
                share = (1.05 - relative[i - 1]) / (relative[i] - relative[i - 1])
                end = 2 ** (math.log2(lengths[i - 1]) + share * math.log2(lengths[i] / lengths[i - 1]))
                break
        reached[seed] = end - start
    return Value(pd.Series(reached), found[0].shown)


# name before the colon -> measure; those in LINEAR are compared as they are, all others are logarithms
MEASURES: dict[str, Callable[[Tier, str, str], Value]] = {
    "full": perplexity("full"),
    "windowed": perplexity("windowed"),
    "sliding": perplexity("sliding"),
    "position": position("full"),
    "position windowed": position("windowed"),
    "second flattest head": head,
    "shift": shift,
    "term": term,
    "speed": speed,
    "exact match": exact_match,
    "reach": reach,
}
LINEAR = ("second flattest head", "exact match", "reach")
