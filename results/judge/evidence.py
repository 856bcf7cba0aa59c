"""The committed results of a tier, a group of comparisons, as values that statements compare."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from kerple.compare.estimates import Sums, by_block
from kerple.compare.finished_runs import Runs, read_runs
from results.judge.plan import readable_runs


class Untested(LookupError):
    """The results do not contain a number of a statement. The message names it."""


@dataclass(frozen=True)
class Value:
    """A measured value of one strategy: a logarithm, such as a mean loss, or the angle of a fraction."""

    of_seed: pd.Series  # the value of each seed
    page: str  # path of the page that shows the value
    blocks: Sums | None = None  # if the value is a mean over blocks of text: sums and counts, (seeds, blocks) each


@dataclass(frozen=True)
class Tier:
    """Comparisons with the same training setup, or a part of their results.

    Args:
        root: Folder of results.
        name: Name of the tier.
        comparisons: Folders in ``root``. If several have a run with the same part, strategy and seed, the first counts.
        trained: Training length.
        what: Description of the runs.
        unit: Unit of the lengths.
        samples: Name of the repetitions: ``seeds``; ``rounds`` of timing, each of which times every strategy once; or
            ``parents``, each of which has a second stage of every strategy.
        left_out: Numbers of the test documents that are left out, because the training text contains them.
        first_seed: Smallest seed that is used.
        first_document: Smallest number of a test document that is used.
    """

    root: Path
    name: str
    comparisons: list[str]
    trained: int
    what: str
    unit: str = "tokens"
    samples: str = "seeds"
    left_out: list[int] = field(default_factory=list)
    first_seed: int = 0
    first_document: int = 0

    @property
    def has_results(self) -> bool:
        """Whether a comparison has results that may be read."""
        return bool(self.tables)

    @cached_property
    def comparison_of(self) -> dict[str, str]:
        """The comparison of each strategy, the first that has runs of the strategy."""
        return {run.strategy: name for name in self.comparisons[::-1] for run in readable_runs(self.root, name)}

    @cached_property
    def runs(self) -> Runs:
        """The results of all comparisons. A run in several comparisons is read from the first of them."""
        runs = {}
        for name in self.comparisons[::-1]:
            of_comparison = [run for run in readable_runs(self.root, name) if run.seed >= self.first_seed]
            runs |= {(run.part, run.strategy, run.seed): run for run in of_comparison}
        empty = pd.DataFrame(columns=["strategy", "seed", "metric", "protocol", "length", "block", "sum", "count"])
        return read_runs(runs.values()) if runs else Runs(empty, empty, empty)

    @cached_property
    def blocks(self) -> dict[tuple[str, str, str, int], pd.DataFrame]:
        """Sums by block of the documents that are used, by strategy, metric, protocol and length."""
        blocks = self.runs.blocks
        if self.left_out or self.first_document:
            blocks = blocks[~blocks["block"].isin(self.left_out) & (blocks["block"] >= self.first_document)]
        return dict(iter(blocks.groupby(["strategy", "metric", "protocol", "length"])))

    @cached_property
    def tables(self) -> dict[tuple[str, str], pd.DataFrame]:
        """The rows of each table of results, costs and analyses, by the name of the table and the strategy."""
        tables = {"results": self.runs.results, "costs": self.runs.costs, **self.runs.analyses}
        if (file := self.root / self.comparisons[0] / "costs.csv").exists():  # benchmarks.cost writes it without runs
            tables["costs"] = pd.read_csv(file)
        return {(name, str(s)): rows for name, table in tables.items() for s, rows in table.groupby("strategy")}

    def rows(self, strategy: str, name: str) -> tuple[pd.DataFrame, str]:
        """Return the rows of a strategy in a table, and the path of the page that shows them.

        Raises:
            Untested: If the table has no rows of the strategy.
        """
        if (name, strategy) not in self.tables:
            raise Untested(f"no {strategy} in {name} of {', '.join(self.comparisons)}")
        return self.tables[name, strategy], f"{self.comparison_of.get(strategy, self.comparisons[0])}/table.md"

    @cached_property
    def lengths(self) -> list[int]:
        """Evaluation lengths of the protocol ``full``, in ascending order."""
        results = self.runs.results
        return sorted(int(n) for n in results["length"][results["protocol"] == "full"].unique())

    def losses(self, strategy: str, protocol: str, length: int) -> Value:
        """Return the mean loss in nats by seed, with sums by block of text if all seeds have them.

        Args:
            strategy: Label of the strategy.
            protocol: Start of the protocol's name. The first protocol with this start is used.
            length: Evaluation length.

        Raises:
            Untested: If the loss was not measured.
        """
        rows, page = self.rows(strategy, "results")
        rows = rows[(rows["metric"] == "ppl") & rows["protocol"].str.startswith(protocol) & (rows["length"] == length)]
        if rows.empty:
            raise Untested(f"{page} has no {protocol} of {strategy} at {length}")
        rows = rows[rows["protocol"] == rows["protocol"].iloc[0]].sort_values("seed")
        values = np.log(rows.set_index("seed")["value"])
        blocks = self.blocks.get((strategy, "ppl", rows["protocol"].iloc[0], length))
        if blocks is None or (sums := by_block(blocks, values.index)) is None:
            return Value(values, page)
        return Value(pd.Series(sums[0].sum(1) / sums[1].sum(1), values.index), page, sums)


def length_in_tier(tier: Tier, key: str) -> int:
    """The length that a key means: ``longest``, a multiple of the training length such as ``4x``, or a number."""
    if key == "longest":
        return max(tier.lengths)
    return tier.trained * int(key[:-1]) if key.endswith("x") else int(key)


def perplexity(protocol: str) -> Callable[[Tier, str, str], Value]:
    """Return the measure of a protocol's mean loss. Its key is a length, see `length_in_tier`."""
    return lambda tier, strategy, key: tier.losses(strategy, protocol, length_in_tier(tier, key))


def position(protocol: str) -> Callable[[Tier, str, str], Value]:
    """Return the measure of a protocol's mean loss at a range of positions in a segment.

    Its key is a range such as ``4x..8x``, or ``4x..`` up to the longest length. The sums of losses by document have no
    positions. The loss at positions 4x..8x is therefore computed from the losses of segments of 8x and of 4x. This
    assumes that the first half of an 8x segment has the loss of a 4x segment.
    """

    def measure(tier: Tier, strategy: str, key: str) -> Value:
        start, end = key.split("..")
        low, high = length_in_tier(tier, start), length_in_tier(tier, end or "longest")
        near, far = (tier.losses(strategy, protocol, n) for n in (low, high))

        def beyond(of_far, of_near):
            return (high * of_far - low * of_near) / (high - low)

        blocks = None
        if near.blocks is not None and far.blocks is not None:
            blocks = beyond(far.blocks[0], near.blocks[0]), far.blocks[1]
        return Value(beyond(far.of_seed, near.of_seed), far.page, blocks)

    return measure


def head(tier: Tier, strategy: str, key: str) -> Value:
    """Attention bias at the longest distance of the head whose bias there is the second largest. The key is ignored."""
    rows, page = tier.rows(strategy, "kernels")
    far = rows[rows["distance"] == rows["distance"].max()]
    return Value(far.groupby("seed")["bias"].agg(lambda bias: bias.nlargest(2).iloc[-1]), page)


def flattest_heads(tier: Tier, strategy: str) -> tuple[pd.Series, pd.Series]:
    """Return, by seed, the largest bias of a head at the longest distance, and the gain at 2,048 tokens."""
    rows, _ = tier.rows(strategy, "kernels")
    bias = rows[rows["distance"] == rows["distance"].max()].groupby("seed")["bias"].max()
    none, own = (tier.losses(strategy, name, 2048).of_seed for name in ("far_none", "far_own"))
    return bias, (none - own).loc[bias.index]


def term(tier: Tier, strategy: str, key: str) -> Value:
    """Logarithm of the mean over heads of the standard deviation of a term of the scores, which the key names."""
    rows, page = tier.rows(strategy, "four_terms")
    return Value(np.log(rows[rows["term"] == key].groupby("seed")["standard_deviation"].mean()), page)


def speed(tier: Tier, strategy: str, key: str) -> Value:
    """Logarithm of the training throughput in tokens per second. The key is ignored."""
    rows, page = tier.rows(strategy, "costs")
    return Value(np.log(rows.set_index("seed")["tokens_per_second"]).sort_index(), page)


def exact_match(tier: Tier, strategy: str, key: str) -> Value:
    """Angle of the fraction of exact answers.

    The key is ``TASK, LENGTH``, or ``TASK`` for the mean over all lengths beyond the training length.
    """
    task, _, length = key.partition(", ")
    rows, page = tier.rows(strategy, "results")
    rows = rows[(rows["metric"] == "exact_match") & (rows["protocol"] == task)]
    rows = rows[rows["length"] == int(length) if length else rows["length"] > tier.trained]
    if rows.empty:
        raise Untested(f"{page} has no {key} of {strategy}")
    return Value(angle(rows.groupby("seed")["value"].mean()), page)


def angle(fraction):
    """Return asin √fraction, from 0 to π/2. Its variance hardly depends on the fraction (Fisher)."""
    return np.arcsin(np.sqrt(fraction))


# measure by the name before the colon of a term; measures in FRACTIONS are angles, all others are logarithms
MEASURES: dict[str, Callable[[Tier, str, str], Value]] = {
    "full": perplexity("full"),
    "windowed": perplexity("windowed"),
    "own": perplexity("far_own"),
    "none": perplexity("far_none"),
    "foreign": perplexity("far_foreign"),
    "factor": perplexity("factor_own"),
    "position": position("full"),
    "position windowed": position("windowed"),
    "second flattest head": head,
    "term": term,
    "speed": speed,
    "exact match": exact_match,
}
FRACTIONS = ("exact match",)
