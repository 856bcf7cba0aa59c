"""Statistics of a comparison, whose runs differ in positional strategy and seed.

Compared runs have equal training data, training budget and test targets. A *result* is a row (strategy, seed, metric,
protocol, length, value). A *protocol* is a way of scoring a text, such as ``windowed64``, or the name of a task. A
*cell* is a (metric, protocol, length). In each cell, a strategy is compared with the baseline over all seeds of both,
on the same test text. Runs are not paired by seed: in `results/main`, the losses of two strategies with the same seed
are correlated by only 0.05 to 0.46, and pairing would exclude seeds that only one strategy has.
"""

import math

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from kerple.base.errors import require
from kerple.compare.estimates import by_block, difference, estimate, logarithm, over_seeds

CELL = ["metric", "protocol", "length"]
METRIC_NAMES = {
    "ppl": "Perplexity",
    "bits_per_byte": "Bits per byte",
    "exact_match": "Exact match",
    "token_accuracy": "Token accuracy",
    "accuracy": "Accuracy",
}
LOWER_IS_BETTER = ("ppl", "bits_per_byte")
LOGARITHMIC = ("ppl", "bits_per_byte")  # metrics that are compared by differences of their logarithms


def lower_is_better(metric: str) -> bool:
    """Whether a smaller value of this metric is better.

    Raises:
        UserError: If the metric is not known.
    """
    expected = f"one of {', '.join(METRIC_NAMES)}; add your own to METRIC_NAMES in {__name__}"
    require(metric in METRIC_NAMES, "metric", repr(metric), expected)
    return metric in LOWER_IS_BETTER


def holm(p: ArrayLike) -> NDArray[np.float64]:
    """Return p-values with Holm's (1979) step-down correction, which controls the family-wise error rate.

    The i-th smallest of n p-values is multiplied by n - i + 1. The products are then made monotone and at most 1. NaN
    stays NaN and is not one of the n. The p-values may depend on each other in any way.
    """
    p = np.asarray(p, dtype=np.float64)
    adjusted, tested = np.full_like(p, np.nan), np.flatnonzero(~np.isnan(p))
    order = tested[np.argsort(p[tested], kind="stable")]
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)), 1.0)
    return adjusted


def against_baseline(results: pd.DataFrame, baseline: str, blocks: pd.DataFrame | None = None) -> pd.DataFrame:
    """Test each strategy against the baseline in each cell by Welch's two-sided test over all seeds of both.

    Perplexities and bits per byte are compared by their logarithms. The logarithm of a perplexity is the mean loss in
    nats. Accuracies are not transformed. Holm's correction is applied over the strategies of a cell. There is no other
    correction.

    Args:
        results: Columns strategy, seed, metric, protocol, length, value; a row for each combination.
        baseline: The strategy with which the others are compared. Cells without it are left out.
        blocks: Sums of losses (nats) or of correct answers in each block of test text, with the columns strategy, seed,
            metric, protocol, length, block, sum and count; see `kerple.compare.finished_runs.Runs`. If both strategies
            have the same blocks in a cell, Welch's variance over seeds is increased by the variance over blocks.

    Returns:
        One row for each cell and each strategy except the baseline, with the columns

        - ``fewest_seeds``: the smaller number of seeds of the two strategies,
        - ``blocks``: number of blocks of text; 1 if the test is only over seeds,
        - ``difference``: mean over seeds minus the baseline's mean; for `LOGARITHMIC` metrics, means of logarithms,
        - ``difference_low`` and ``difference_high``: 95% interval of the difference,
        - ``t``, ``p``, and ``p_holm`` after Holm's correction.

        The interval, t and p are NaN if either strategy has one seed, or if the difference is not finite. If the
        difference and its standard error are both 0, only t and p are NaN.

    Raises:
        UserError: If the baseline has no results.
    """
    strategies = list(dict.fromkeys(results["strategy"]))
    require(baseline in strategies, "compare: baseline", repr(baseline), f"one of {', '.join(strategies)}")
    with np.errstate(divide="ignore"):
        logarithms = np.log(results["value"])
    results = results.assign(value=logarithms.where(results["metric"].isin(LOGARITHMIC), results["value"]))
    by_cell = {} if blocks is None else dict(iter(blocks.groupby(["strategy", *CELL])))
    rows = []
    for cell, group in results.groupby(CELL, sort=False):
        values = {strategy: of.set_index("seed")["value"] for strategy, of in group.groupby("strategy")}
        if baseline not in values:
            continue
        # bits per byte have no sums by block; the sums of `ppl` are of the same losses
        losses = ("ppl", *cell[1:]) if cell[0] == "bits_per_byte" else cell
        for strategy in (s for s in strategies if s != baseline and s in values):
            pair = [(by_cell.get((name, *losses)), values[name].index) for name in (strategy, baseline)]
            ours, theirs = (None if sums is None else by_block(sums, seeds) for sums, seeds in pair)
            if cell[0] == "bits_per_byte" and ours and theirs:
                ours, theirs = logarithm(*ours), logarithm(*theirs)
            with np.errstate(divide="ignore", invalid="ignore"):
                over_text = difference(ours, theirs)
                by_seed = estimate(over_seeds(values[strategy]), over_seeds(-values[baseline]))
                if over_text and cell[0] == "bits_per_byte":
                    # the losses of two tokenizers have another ratio, and blocks of equal numbers of tokens other text
                    same_text = np.isclose(over_text.mean, by_seed.mean, atol=1e-6, equal_nan=True)
                    over_text = over_text if same_text else None
                effect = over_text or by_seed
                t = np.divide(effect.mean, effect.error)  # 0 / 0 is NaN: there is nothing to test
            p = effect.p() if t == t else math.nan
            rows.append((strategy, *cell, effect.seeds, effect.blocks, effect.mean, *effect.interval(), t, p))
    names = ["fewest_seeds", "blocks", "difference", "difference_low", "difference_high", "t", "p"]
    tests = pd.DataFrame(rows, columns=["strategy", *CELL, *names])
    tests["p_holm"] = tests.groupby(CELL)["p"].transform(holm) if len(tests) else tests["p"]
    return tests


def summarise(results: pd.DataFrame, baseline: str, blocks: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return mean and standard deviation over seeds for every strategy and cell, with the tests against the baseline.

    Args:
        results: See `against_baseline`.
        baseline: The strategy with which the others are compared.
        blocks: See `against_baseline`.

    Returns:
        One row for each strategy and cell, in the order of the results, with the columns of `against_baseline` and

        - ``seeds`` (number n of seeds), ``mean`` and ``std`` (n - 1 in the denominator; NaN for one seed),
        - ``best``: whether no mean of the cell is better; false if the means of all strategies are equal,
        - ``significant``: whether p_holm < 0.05,
        - ``ratio``, ``ratio_low`` and ``ratio_high``: geometric mean over seeds divided by that of the baseline, and
            the 95% interval of this ratio; NaN if the metric is not logarithmic.

    Raises:
        UserError: If a metric is unknown, or the baseline is missing.
    """
    tests = against_baseline(results, baseline, blocks)
    keys = ["strategy", *CELL]
    summary = results.groupby(keys, sort=False)["value"].agg(seeds="count", mean="mean", std="std").reset_index()
    sign = np.where(summary["metric"].map(lower_is_better), 1.0, -1.0)
    cost = summary["mean"] * sign  # lower is better for every metric
    cells = cost.groupby([summary[c] for c in CELL])
    summary["best"] = (cost == cells.transform("min")) & (cost < cells.transform("max"))
    summary = summary.merge(tests, on=keys, how="left")
    summary["significant"] = summary["p_holm"] < 0.05
    logarithmic = summary["metric"].isin(LOGARITHMIC)
    for end in ("", "_low", "_high"):
        summary[f"ratio{end}"] = np.exp(summary[f"difference{end}"].astype(float).where(logarithmic))
    summary.loc[logarithmic & (summary["strategy"] == baseline), "ratio"] = 1.0
    return summary
