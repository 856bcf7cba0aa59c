"""How the advantage over ALiBi and the context gain at 8 times the training length go with size and tokens.

`python -m results.trend results` reads the runs of scaling and small, and writes scaling/trend.md and a figure. It
carries the line through the advantages to the size of the paper (Chi et al. 2022), beside the paper's own numbers.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from kerple.compare.figures import COLOURS, MARKERS, plain, save
from kerple.compare.runs import committed, read
from kerple.compare.statistics import Estimate, by_block, difference
from kerple.compare.tables import Cell, Table

OURS, THEIRS, TIMES = "KerpleLog", "ALiBi", 8
GAINS = (OURS, THEIRS)
# Table 3 of the paper at 8 times its training length, perplexity of KERPLE-log and of ALiBi; 50,000 steps of 32 x 512
PAPER = {"OpenWebText2": (21.2, 22.2), "GitHub": (2.74, 3.04), "ArXiv": (5.20, 5.87)}
PAPER_PARAMETERS, PAPER_TOKENS = 162e6, 50_000 * 32 * 512
PAPER_COMPUTE = 6 * PAPER_PARAMETERS * PAPER_TOKENS  # floating-point operations, as Setting.compute


@dataclass(frozen=True)
class Setting:
    """A size and a number of training tokens, and what was found there at 8 times the training length.

    Args:
        parameters: Parameters of the network without those of its strategy.
        tokens: Training tokens.
        advantage: Mean loss of ALiBi less that of KERPLE-log, in nats.
        gains: Context gain by strategy, in nats.
    """

    parameters: int
    tokens: int
    advantage: Estimate
    gains: dict[str, Estimate]

    @property
    def compute(self) -> float:
        """Floating-point operations of training, six for each parameter and token."""
        return 6.0 * self.parameters * self.tokens


def settings(root: Path) -> list[Setting]:
    """The settings of which both strategies have runs, by size and tokens.

    Args:
        root: The folder that holds the comparisons' reports.

    Raises:
        ValueError: If the runs of a setting are not on the same text, or two comparisons have the same run.
    """
    losses: dict[tuple[int, int], list[pd.DataFrame]] = defaultdict(list)
    for comparison in ("scaling", "small"):
        for run in committed(root / comparison):
            if run.strategy not in GAINS:
                continue
            runs = read([replace(run, part="")])  # a part has the protocols of every other
            config, cost = next(iter(runs.configs.values())), runs.costs.iloc[0]
            length = config["data.init_args.length"]
            tokens = config["trainer.max_steps"] * config["data.init_args.batch_size"] * length
            at = losses[int(cost["parameters"] - cost["position_parameters"]), tokens]
            if any(((block["strategy"] == run.strategy) & (block["seed"] == run.seed)).any() for block in at):
                raise ValueError(f"{run.folder}: got a second run of this size, tokens and seed, expected one")
            protocol = runs.blocks["protocol"].str.replace(r"\d+$", "", regex=True)
            far = (runs.blocks["length"] == TIMES * length) & protocol.isin(["full", "windowed"])
            at.append(runs.blocks.assign(protocol=protocol)[far & (runs.blocks["metric"] == "ppl")])
    found = []
    for setting, at in sorted(losses.items()):
        blocks = pd.concat(at)
        if set.intersection(*(set(blocks["seed"][blocks["strategy"] == strategy]) for strategy in GAINS)):
            gains = {strategy: _difference(blocks, (strategy, "windowed"), (strategy, "full")) for strategy in GAINS}
            found.append(Setting(*setting, _difference(blocks, (THEIRS, "full"), (OURS, "full")), gains))
    return found


def _difference(blocks: pd.DataFrame, ours: tuple[str, str], theirs: tuple[str, str]) -> Estimate:
    """Of the mean losses of two (strategy, protocol), over the seeds that both have and over text."""
    sides = [
        blocks[(blocks["strategy"] == name) & (blocks["protocol"] == protocol)] for name, protocol in (ours, theirs)
    ]
    seeds = set(sides[0]["seed"]) & set(sides[1]["seed"])
    found = difference(*(by_block(side, sorted(seeds)) for side in sides)) if seeds else None
    if found is None:
        raise ValueError(
            f"{ours} and {theirs}: got other blocks of text in one run than in another, or none, expected the same"
        )
    return found


def line(x: ArrayLike, y: ArrayLike, at: ArrayLike) -> NDArray[np.float64]:
    """The least-squares line through some points, and its 95% interval by Student's t.

    Args:
        x: (points,), three or more.
        y: (points,).
        at: (m,), where the line is wanted.

    Returns:
        (3, m) fp64: the line, and both ends of its interval.
    """
    x, y, at = (np.asarray(values, dtype=np.float64) for values in (x, y, at))
    found = stats.linregress(x, y)
    middle = found.slope * at + found.intercept
    residual = np.square(y - found.slope * x - found.intercept).sum() / (len(x) - 2)
    error = np.sqrt(residual * (1 / len(x) + np.square(at - x.mean()) / np.square(x - x.mean()).sum()))
    half = stats.t.isf(0.025, len(x) - 2) * error
    return np.stack([middle, middle - half, middle + half])


def table(found: list[Setting]) -> Table:
    """A row for each setting, and one for what the trend says of the paper's."""
    rows = {
        f"{setting.parameters / 1e6:.1f}M, {setting.tokens / 1e6:.1f}M tokens": {
            "seeds": Cell(str(setting.advantage.seeds)),
            f"{THEIRS} above {OURS} (%)": Cell(_percent(setting.advantage.mean, *setting.advantage.interval())),
        }
        | {
            f"gain of {strategy} (nats)": Cell("{:+.4f} [{:+.4f}, {:+.4f}]".format(gain.mean, *gain.interval()))
            for strategy, gain in setting.gains.items()
        }
        for setting in found
    }
    if len(found) > 2:
        x = [math.log10(setting.compute) for setting in found]
        at = math.log10(PAPER_COMPUTE)
        carried = line(x, [setting.advantage.mean for setting in found], [at])[:, 0]
        rows[f"{PAPER_PARAMETERS / 1e6:.0f}M, {PAPER_TOKENS / 1e6:.0f}M tokens, extrapolated"] = {
            f"{THEIRS} above {OURS} (%)": Cell(_percent(*carried))
        }
    measured = ", ".join(f"{100 * (theirs / ours - 1):.1f}% on {data}" for data, (ours, theirs) in PAPER.items())
    note = (
        f"At {TIMES} times the training length. Intervals: 95% over seeds and text, with one seed over text alone; of "
        f"the last row, that of a line through the others against the logarithm of compute. The paper has {measured}. "
        "The setting of results/small is tested on its own text."
    )
    return Table("By size and tokens", pd.DataFrame.from_dict(rows, orient="index").fillna(Cell("–")), note)


def _percent(*logarithms: float) -> str:
    middle, low, high = (100 * math.expm1(value) for value in logarithms)
    return f"{middle:+.1f} [{low:+.1f}, {high:+.1f}]"


def figure(found: list[Setting]) -> Figure:
    """The advantage against compute, carried to the paper's; and the context gains against tokens."""
    drawn = Figure(figsize=(10.4, 4.2), layout="constrained")
    left, right = drawn.subplots(1, 2)
    sizes = list(dict.fromkeys(setting.parameters for setting in found))
    _advantage(left, found, sizes)
    _gains(right, found, sizes)
    return drawn


def _bars(
    estimates: list[Estimate], shown: Callable[[NDArray], NDArray] = np.asarray
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Means (n,) and how far their intervals reach below and above them (2, n), as they are shown."""
    middle = shown(np.array([estimate.mean for estimate in estimates]))
    ends = shown(np.transpose([estimate.interval() for estimate in estimates]))
    return middle, np.abs(ends - middle)


def _advantage(ax: Axes, found: list[Setting], sizes: list[int]) -> None:
    for i, size in enumerate(sizes):
        at = [setting for setting in found if setting.parameters == size]
        middle, reach = (100 * values for values in _bars([setting.advantage for setting in at], np.expm1))
        label = f"{size / 1e6:.1f}M parameters"
        x = [setting.compute for setting in at]
        ax.errorbar(x, middle, yerr=reach, fmt=MARKERS[i], color=COLOURS[i], label=label, markersize=5, capsize=2)
    if len(found) > 2:
        x = np.log10([setting.compute for setting in found])
        over = np.linspace(x.min(), math.log10(PAPER_COMPUTE), 100)
        middle, low, high = 100 * np.expm1(line(x, [setting.advantage.mean for setting in found], over))
        ax.plot(10**over, middle, color="black", linewidth=1, linestyle="--", label="line through them, extrapolated")
        ax.fill_between(10**over, low, high, color="black", alpha=0.08, linewidth=0)
    measured = [100 * (theirs / ours - 1) for ours, theirs in PAPER.values()]
    ax.plot([PAPER_COMPUTE] * len(measured), measured, "*", color="#E69F00", markersize=10, label="the paper, 162M")
    for data, value in zip(PAPER, measured, strict=True):
        beside = {"xytext": (-8, 0), "textcoords": "offset points", "ha": "right", "va": "center"}
        ax.annotate(data, (PAPER_COMPUTE, value), fontsize=8, **beside)
    ax.axhline(0, color="black", linewidth=0.8)
    ends = [100 * math.expm1(end) for setting in found for end in setting.advantage.interval()]
    # the interval of the line has no end worth an axis, where there are few settings
    ax.set(xscale="log", xlabel="training compute (floating-point operations)")
    ax.set_ylim(min(*ends, *measured, 0) - 25, max(*ends, *measured) + 5)
    ax.set_ylabel(f"{THEIRS} above {OURS} at {TIMES}× (% of perplexity)")
    ax.legend(frameon=False, fontsize=8, loc="lower left")
    plain(ax)


def _gains(ax: Axes, found: list[Setting], sizes: list[int]) -> None:
    for i, size in enumerate(sizes):
        at = [setting for setting in found if setting.parameters == size]
        for j, (strategy, line_of, inside) in enumerate(zip(GAINS, ("-", ":"), (COLOURS[i], "white"), strict=True)):
            x = [setting.tokens * 1.03 ** (i + len(sizes) * j) for setting in at]  # beside each other, to be seen
            middle, reach = _bars([setting.gains[strategy] for setting in at])
            label = f"{strategy}, {size / 1e6:.1f}M"
            marker = {"marker": MARKERS[i], "markersize": 5, "markerfacecolor": inside, "capsize": 2}
            ax.errorbar(x, middle, reach, label=label, color=COLOURS[i], linestyle=line_of, linewidth=1, **marker)
    ax.axhline(0, color="black", linewidth=0.8)
    ax.set(xscale="log", xlabel="training tokens", ylabel=f"context gain at {TIMES}× (nats per token)")
    tokens = sorted({setting.tokens for setting in found})
    ax.set_xticks(tokens, [f"{n / 1e6:.1f}M" for n in tokens])
    ax.minorticks_off()
    ax.legend(frameon=False, fontsize=8)
    plain(ax)


def main(arguments: list[str]) -> None:
    """Write the table and the figure into the folder scaling of the one given, ``results`` if none is.

    Raises:
        ValueError: If no setting has runs of both strategies.
    """
    root = Path(arguments[0] if arguments else "results")
    if not (found := settings(root)):
        raise ValueError(f"results: got {root}, without runs of {OURS} and {THEIRS} in scaling or small")
    (root / "scaling").mkdir(exist_ok=True)
    text = table(found).markdown()
    (root / "scaling/trend.md").write_text(text)
    save(figure(found), root / "scaling", "trend")
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
