"""The committed numbers of a tier, as values that statements compare."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
from kerple.compare.files import result_rows, results_in
from numpy.typing import NDArray

Run = dict[tuple[str, int], list[dict[str, float]]]  # (protocol, length) -> its blocks, each with sum and count


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
    tables: dict[Path, pd.DataFrame] = field(default_factory=dict, repr=False)
    runs: dict[Path, Run] = field(default_factory=dict, repr=False)

    @property
    def there(self) -> bool:
        """Whether any of its comparisons is committed."""
        return any((self.root / name).is_dir() for name in self.comparisons)

    def table(self, comparison: str, name: str) -> pd.DataFrame | None:
        """A CSV of a report, None if it has none."""
        path = self.root / comparison / f"{name}.csv"
        if path not in self.tables:
            self.tables[path] = pd.read_csv(path) if path.exists() else pd.DataFrame({"strategy": []})
        return self.tables[path]

    def rows(self, strategy: str, *names: str, where: Callable[[pd.DataFrame], pd.Series] | None = None) -> tuple:
        """Rows of a strategy in the first comparison that has any, and that file.

        Raises:
            Untested: If none has.
        """
        for comparison in self.comparisons:
            for name in names:
                table = self.table(comparison, name)
                found = table[table["strategy"] == strategy]
                if len(found) and where is not None:
                    found = found[where(found)]
                if len(found):
                    return found, f"{comparison}/{name}.csv"
        raise Untested(f"no {strategy} in {' or '.join(f'{c}/{n}.csv' for c in self.comparisons for n in names)}")

    @cached_property
    def lengths(self) -> list[int]:
        """Evaluation lengths of its first comparison."""
        for comparison in self.comparisons:
            table = self.table(comparison, "results")
            if "protocol" in table and len(rows := table[table["protocol"] == "full"]):
                return sorted(int(n) for n in rows["length"].unique())
        return []

    def losses(self, strategy: str, protocol: str, length: int) -> Value:
        """Mean loss in nats, by seed and, where runs are kept, by block of text.

        Raises:
            Untested: If it was not measured.
        """
        rows, path = self.rows(
            strategy, "results",
            where=lambda t: (t["metric"] == "ppl") & t["protocol"].str.startswith(protocol) & (t["length"] == length),
        )  # fmt: skip
        rows = rows[rows["protocol"] == rows["protocol"].iloc[0]].sort_values("seed")
        values = rows.set_index("seed")["value"]
        return Value(np.log(values), path, self._blocks(strategy, rows["protocol"].iloc[0], length, values))

    def _blocks(self, strategy: str, protocol: str, length: int, values: pd.Series) -> tuple | None:
        """Sums and counts by block out of the committed runs that gave these values, None unless all seeds have them.

        A comparison may take a run that is kept beside another: `also` of demo.yaml names field.
        """

        def blocks_of(seed: int, value: float) -> list[dict[str, float]]:
            for comparison in self.comparisons:
                run = self._run(self.root / comparison / "runs" / strategy / f"seed-{seed}.json")
                blocks = run.get((protocol, length), [])
                loss = sum(b["sum"] for b in blocks) / (sum(b["count"] for b in blocks) or 1)
                if blocks and math.isclose(loss, math.log(value), rel_tol=1e-9):
                    return blocks
            return []

        found = [blocks_of(seed, value) for seed, value in values.items()]
        if not all(found) or len({len(blocks) for blocks in found}) != 1:
            return None
        return tuple(np.array([[b[side] for b in blocks] for blocks in found], float) for side in ("sum", "count"))

    def _run(self, path: Path) -> Run:
        """Blocks of a committed run, by protocol and length; empty if it is not there."""
        if path not in self.runs:
            test = json.loads(path.read_text())["run"]["test"] if path.exists() else {}
            rows = result_rows(test.get("extrapolation.json", []))
            cells = (cell for row in rows for cell in results_in(row, path))
            self.runs[path] = {(c["protocol"], c["length"]): blocks for c, blocks in cells if c["metric"] == "ppl"}
        return self.runs[path]


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
    rows, path = tier.rows(
        strategy, "results",
        where=lambda t: (t["metric"] == "exact_match") & (t["protocol"] == task)
        & (t["length"] == int(length) if length else t["length"] > tier.trained),
    )  # fmt: skip
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
