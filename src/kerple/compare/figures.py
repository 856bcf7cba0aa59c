"""Figures of a comparison, drawn from its tables."""

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from kerple.compare.statistics import METRIC_NAMES, in_tokens, lower_is_better

# the first seven are Okabe and Ito's palette for colour-blind readers; curves in other colours have other dashes too
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
COLOURS += ["#7A1FE0", "#6B6B00", "#C00060", "#808080", "#7A3B1E", "#00008B", "#E030E0"]
DASHES = ("-", "--", ":", "-.")  # each for seven curves in turn
MARKERS = "osD^vP*X"
Styles = dict[str, dict[str, Any]]
"""Colour, dashes and marker by strategy."""
Draw = Callable[[Axes, pd.DataFrame, Styles], tuple[float, float]]
DEVIATION, INTERVAL = "band: one standard\ndeviation over seeds", "band: 95% interval"
HEADROOM = 4.0  # largest ratio of the upper end of an axis to the best value


def figures(summary: pd.DataFrame, trained: Mapping[str, int | None], baseline: str) -> Iterator[tuple[str, Figure]]:
    """Yield (name, figure) of each metric against length, and of its ratio to the baseline, with a panel per protocol.

    Bits per byte have no figure if perplexity has one, because both are functions of the same loss.

    Args:
        summary: Result of `kerple.compare.statistics.summarise`.
        trained: Training length of the runs by protocol, or None if it is not known or differs.
        baseline: The strategy in the denominator of ratios.
    """
    styles = styles_of(summary["strategy"])
    for metric, chosen in summary.groupby("metric", sort=False):
        if metric == "bits_per_byte" and "ppl" in set(summary["metric"]):
            continue
        label = METRIC_NAMES[str(metric)].lower()
        yield f"{metric}-against-length", _panels(chosen, styles, trained, _values, label)
        if not (with_interval := chosen[chosen["ratio_low"].notna()]).empty:
            label = f"difference from {literal(baseline)} (%)"
            yield f"{metric}-relative-to-{baseline}", _panels(with_interval, styles, trained, _ratios, label)


def loss_and_gain(results: pd.DataFrame, strategies: pd.Series) -> Iterator[tuple[str, Figure]]:
    """Yield (name, figure) of the gain from distant text against the loss, at the longest length, with a point per run.

    The gain is the loss without distant text (protocol ``far_none``) minus the loss with it (``far_own``). The loss on
    the horizontal axis is that of ``full``. Each part of the comparison, such as a corpus, has a figure if it has
    results of these protocols. If there are parts, the name of a protocol begins with the part, as in ``rfc full``.

    Args:
        results: Results of the runs, see `kerple.compare.finished_runs.Runs`.
        strategies: Labels of all strategies, in the order of their colours.
    """
    styles = styles_of(strategies)
    results = results[results["metric"] == "ppl"]
    losses = results.pivot(index=["length", "strategy", "seed"], columns="protocol", values="value").apply(np.log)
    for own in (protocol for protocol in map(str, losses) if "far_own" in protocol):
        part = own.rpartition(" ")[0]
        points = losses.reindex(columns=[f"{part} full".strip(), own.replace("far_own", "far_none"), own]).dropna()
        if points.empty:
            continue
        length = points.index.get_level_values("length").max()
        points = points.loc[length].set_axis(["loss", "none", "own"], axis=1).eval("gain = none - own")
        figure = Figure(figsize=(6.8, 4.2), layout="constrained")
        ax = figure.subplots()
        for strategy, runs in points.groupby("strategy", sort=False):
            ax.plot(runs["loss"], runs["gain"], label=literal(strategy), **styles[str(strategy)] | {"linestyle": ""})
        ax.axhline(0, color="black", linewidth=0.8)
        # the limits keep small gains visible; runs with a much larger loss, or a large negative gain, are outside
        bottom, _ = ax.set_ylim(bottom=max(ax.get_ylim()[0], -max(points["gain"].max(), 0.01)))
        _, right = ax.set_xlim(right=min(ax.get_xlim()[1], points["loss"].min() + 0.4))
        outside = ((points["loss"] > right) | (points["gain"] < bottom)).sum()
        ax.set(xlabel=f"loss at {length:,} tokens (nats per token), lower is better")
        ax.set(ylabel="gain from distant text (nats per token);\n0: distant text does not lower the loss")
        plain(ax)
        add_legend(figure, "one point per run" + f";\n{outside} outside the axes" * bool(outside))
        yield f"loss-and-gain{part and f'-{part}'}", figure


def save(figure: Figure, folder: Path, name: str) -> Path:
    """Write a figure as PNG and SVG, and return the path of the SVG. The files contain no time of writing."""
    path = folder / f"{name.replace('/', '_')}.svg"
    figure.savefig(path.with_name(f"{path.stem}.png"), dpi=150, metadata={"Software": None})
    with rc_context({"svg.hashsalt": name}):
        figure.savefig(path, metadata={"Date": None})
    return path


def literal(strategy: str) -> str:
    """Escape a label. Matplotlib would show text between $ as a formula, and hide labels that begin with _."""
    return re.sub("^_", " _", str(strategy).replace("$", r"\$"))


def plain(ax: Axes) -> None:
    """Draw a faint grid, and hide the frame at the top and the right."""
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)


def styles_of(strategies: pd.Series) -> Styles:
    """The style of each strategy, in the order of first appearance. The first 28 styles differ in colour or dashes."""
    looks = zip(cycle(COLOURS), cycle(np.repeat(DASHES, 7).tolist()), cycle(MARKERS), strict=False)
    styles = ({"color": color, "linestyle": dashes, "marker": marker} for color, dashes, marker in looks)
    return dict(zip(dict.fromkeys(strategies), styles, strict=False))


def _panels(chosen: pd.DataFrame, styles: Styles, trained: Mapping[str, int | None], draw: Draw, label: str) -> Figure:
    """Draw a panel per protocol, with a common vertical axis and a legend.

    Args:
        chosen: The rows of a summary with one metric.
        styles: The style of each strategy.
        trained: Training length of the runs by protocol, or None if it is not known or differs.
        draw: Function that draws the rows of a protocol, and returns the range that its vertical axis needs.
        label: Label of the vertical axis.
    """
    protocols = list(dict.fromkeys(chosen["protocol"]))
    columns = min(len(protocols), 3)
    rows = -(-len(protocols) // columns)
    figure = Figure(figsize=(4.6 * columns + 1.8, 3.6 * rows + 0.3), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for ax in axes.flat[len(protocols) :]:
        ax.remove()
    ranges = []
    for ax, protocol in zip(axes.flat, protocols, strict=False):
        panel = chosen[chosen["protocol"] == protocol]
        ranges.append(draw(ax, panel, styles))
        ax.set_title(literal(protocol), fontsize=10, pad=14)
        plain(ax)
        tokens = in_tokens(panel["metric"].iloc[0], protocol)
        ax.set_xlabel("evaluation length (tokens)" if tokens else "length of the problem")
        _lengths(ax, sorted(panel["length"].unique()), trained[protocol])
    axes[0, 0].set_ylim(min(low for low, _ in ranges), max(high for _, high in ranges))  # shared by all panels
    if axes[0, 0].get_yscale() == "log":
        plain_log_ticks(axes[0, 0])
    for ax in axes[:, 0]:
        ax.set_ylabel(label)
    has_bands = chosen["std"].notna().any()  # not with one seed
    add_legend(figure, (INTERVAL if draw is _ratios else DEVIATION) if has_bands else None)
    return figure


def add_legend(figure: Figure, title: str | None) -> None:
    """Add a legend of all curves at the right. If it needs several columns, the figure becomes wider."""
    handles = {name: h for ax in figure.axes for h, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    columns = -(-len(handles) // 15)  # as many rows as fit into the height of a panel
    figure.set_figwidth(figure.get_figwidth() + 1.8 * (columns - 1))
    place: Any = {"loc": "outside right center", "ncols": columns, "frameon": False}
    # handlelength: in units of the font size, long enough to show the dashes
    figure.legend(handles.values(), handles.keys(), title=title, fontsize=9, handlelength=3.2, **place)


def _values(ax: Axes, panel: pd.DataFrame, styles: Styles) -> tuple[float, float]:
    """Draw mean and standard deviation in one panel, and return the range of its vertical axis."""
    mean, spread = panel["mean"], panel["std"].fillna(0)
    low, high = mean - spread, mean + spread
    _curves(ax, panel.assign(middle=mean, low=low, high=high), styles)
    if not lower_is_better(panel["metric"].iloc[0]):
        return -0.02, 1.02
    ax.set_yscale("log")
    best = mean.min()
    if not np.isfinite(best):
        return 1, HEADROOM
    return max(low.min(), best / HEADROOM) / 1.04, min(high.max(), HEADROOM * best) * 1.04


def _ratios(ax: Axes, panel: pd.DataFrame, styles: Styles) -> tuple[float, float]:
    """Draw differences from the baseline, in percent, in one panel, and return the range of its vertical axis."""
    middle, low, high = (100 * (panel[column] - 1) for column in ("ratio", "ratio_low", "ratio_high"))
    _curves(ax, panel.assign(middle=middle, low=low, high=high), styles)
    ax.axhline(0, color="black", linewidth=0.8)
    return max(min(low.min(), 0) * 1.1 - 1, -50), min(max(high.max(), 0) * 1.1 + 1, 40)


def _curves(ax: Axes, panel: pd.DataFrame, styles: Styles) -> None:
    """Draw ``middle`` against length, and a band from ``low`` to ``high``, for each strategy."""
    for strategy, group in panel.groupby("strategy", sort=False):
        group = group.sort_values("length")
        style = styles[str(strategy)]
        ax.plot(group["length"], group["middle"], label=literal(str(strategy)), markersize=4, linewidth=1.5, **style)
        ax.fill_between(group["length"], group["low"], group["high"], alpha=0.15, color=style["color"], linewidth=0)


def _lengths(ax: Axes, lengths: list[int], trained: int | None) -> None:
    """Set the scale and the ticks of the lengths, and mark the training length."""
    if len(lengths) > 1 and np.median(np.divide(lengths[1:], lengths[:-1])) >= 1.4:  # such as 64, 128, 256
        ax.set_xscale("log", base=2)
        shown = lengths[:: -(-len(lengths) // 8)]
        ax.set_xticks(shown, map(str, shown))
        ax.minorticks_off()
    else:
        ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    if trained is not None and lengths[0] <= trained <= lengths[-1]:
        ax.axvline(trained, color="black", linewidth=0.8, linestyle=":")
        # above the axes, where the text covers no curve
        ax.text(trained, 1.01, "trained", transform=ax.get_xaxis_transform(), fontsize=7, ha="center")


def plain_log_ticks(ax: Axes) -> None:
    """Set ticks of a logarithmic vertical axis at round numbers, without exponents."""
    low, high = ax.get_ylim()
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 20 * low else (1, 1.2, 1.5, 2, 3, 4, 5, 7)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_locator(NullLocator())
