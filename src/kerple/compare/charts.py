"""Charts of a report: their points and axes. `kerple.compare.figures` and the script of the page draw them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from kerple.compare.estimates import Estimate, estimate, over_seeds
from kerple.compare.finished_runs import Runs, by_part
from kerple.compare.statistics import CELL, METRIC_NAMES, lower_is_better
from kerple.compare.tables import format_estimate, format_mean

DEVIATION, INTERVAL = "band: one standard\ndeviation over seeds", "band: 95% interval"
HEADROOM = 4.0  # largest ratio of the upper end of an axis to the best value
POINTS = 32  # points of a curve of the loss by position
PER_OCTAVE = 2  # points per octave of distance of a curve of the gain
CURVES = {"train_loss": "Training loss", "val_loss": "Validation loss", "tokens_per_second": "Training speed"}


@dataclass(frozen=True)
class Panel:
    """The curves of one protocol, or of one part of the comparison.

    Args:
        name: Name of the protocol or part; empty if the chart has no other panel.
        points: Columns strategy, x, y, low and high (ends of the band), and text (shown at the pointer). A curve
            connects the points of a strategy in their order.
        across: Label of the horizontal axis.
        log: Whether the horizontal axis is logarithmic.
        mark: Place on the horizontal axis that is marked, and the text of the mark.
    """

    name: str
    points: pd.DataFrame
    across: str
    log: bool = False
    mark: tuple[int, str] | None = None


@dataclass(frozen=True)
class Chart:
    """A chart with panels, which share the vertical axis.

    Args:
        name: Name of the files with the figure, or empty if the chart is only on the page.
        title: Title on the page.
        panels: The panels.
        label: Label of the vertical axis.
        limits: Ends of the vertical axis; None for all values. A curve of a collapsed strategy may leave the axis.
        note: Title of the legend, such as the meaning of the bands.
        log: Whether the vertical axis is logarithmic.
        zero: Whether to draw a line at 0.
        lines: Whether to connect the points.
    """

    name: str
    title: str
    panels: list[Panel]
    label: str
    limits: tuple[float, float] | None = None
    note: str = ""
    log: bool = False
    zero: bool = False
    lines: bool = True


def charts(summary: pd.DataFrame, runs: Runs, baseline: str) -> Iterator[Chart]:
    """Yield all charts of a report, in the order of the page.

    Args:
        summary: Result of `kerple.compare.statistics.summarise`. Only its strategies are shown.
        runs: The summarised runs.
        baseline: The strategy in the denominator of ratios.
    """
    first, *others = metric_charts(summary, runs, baseline)
    gain = runs.analyses.get("context_gain")
    yield first
    yield from context_charts(gain, summary["strategy"], "gain")
    yield from others
    yield from context_charts(gain, summary["strategy"], "loss")
    yield from loss_and_gain(runs.results)
    yield from training_charts(runs)


def metric_charts(summary: pd.DataFrame, runs: Runs, baseline: str) -> Iterator[Chart]:
    """Yield the charts of each metric against length, and of its ratio to the baseline, with a panel per protocol.

    Bits per byte are only on the page if there are perplexities, because both are functions of the same loss. The
    arguments are those of `charts`.
    """
    by_seed = runs.results.groupby(["strategy", *CELL])["value"].agg(lambda of: ", ".join(map(format_mean, of)))
    summary = summary.join(by_seed.rename("by_seed"), on=["strategy", *CELL])
    for metric, rows in summary.groupby("metric", sort=False):
        name, lower, bands = METRIC_NAMES[str(metric)], lower_is_better(str(metric)), bool(rows["std"].notna().any())
        is_file = metric != "bits_per_byte" or "ppl" not in set(summary["metric"])
        values = with_deviation(rows.assign(x=rows["length"], text="\nseeds: " + rows["by_seed"]))
        best = values.groupby("protocol")["y"].min()
        low, high = max(values["low"].min(), best.min() / HEADROOM), min(values["high"].max(), best.max() * HEADROOM)
        limits = (low / 1.04, high * 1.04) if lower else (-0.02, 1.02)
        limits = limits if np.isfinite(limits).all() else (1.0, HEADROOM)  # all runs collapsed
        file, title, note = f"{metric}-against-length" * is_file, f"{name} against length", DEVIATION * bands
        yield Chart(file, title, _panels(values, runs), name.lower(), limits, note, log=lower)
        ratios = _ratio_points(rows[rows["ratio_low"].notna()])
        if len(ratios):
            limits = max(min(ratios["low"].min(), 0) * 1.1 - 1, -50), min(max(ratios["high"].max(), 0) * 1.1 + 1, 40)
            file, title = f"{metric}-relative-to-{baseline}" * is_file, f"{name} relative to {baseline}"
            label, note = f"difference from {baseline} (%)", INTERVAL * bands
            yield Chart(file, title, _panels(ratios, runs), label, limits, note, zero=True)


def _ratio_points(rows: pd.DataFrame) -> pd.DataFrame:
    """Add the columns of `Panel` to the rows of a summary: ratio to the baseline in percent, less 100."""
    ends = rows[["ratio", "ratio_low", "ratio_high"]]
    texts = [f"ratio {format_estimate('.3f', *of)}" for of in ends.itertuples(index=False)]
    percent = (100 * (ends - 1)).set_axis(["y", "low", "high"], axis=1)
    return rows.assign(x=rows["length"], text=texts).join(percent)


def with_deviation(rows: pd.DataFrame) -> pd.DataFrame:
    """Add the columns y, low and high of `Panel` to rows with mean and std, and write both before the text."""
    spread = rows["std"].fillna(0)
    texts = [format_mean(*of) for of in zip(rows["mean"], rows["std"], strict=True)]
    return rows.assign(y=rows["mean"], low=rows["mean"] - spread, high=rows["mean"] + spread, text=texts + rows["text"])


def _panels(points: pd.DataFrame, runs: Runs) -> list[Panel]:
    """A panel per protocol. ``points``: rows of a summary with the columns of `Panel`."""
    panels = []
    for protocol, rows in points.groupby("protocol", sort=False):
        name, lengths = str(protocol), np.unique(rows["length"])
        in_tokens = lower_is_better(rows["metric"].iloc[0]) or "niah" in name  # losses, needle in a haystack
        across = "evaluation length (tokens)" if in_tokens else "length of the problem"
        log = len(lengths) > 1 and bool(np.median(lengths[1:] / lengths[:-1]) >= 1.4)  # such as 64, 128, 256
        trained = runs.training_lengths[name]
        panels.append(Panel(name, rows, across, log, None if trained is None else (trained, "trained")))
    return panels


def loss_and_gain(results: pd.DataFrame) -> Iterator[Chart]:
    """Yield the chart of the gain from distant text against the loss, at the longest length, with a point per run.

    The gain is the loss without distant text (protocol ``far_none``) minus the loss with it (``far_own``). The loss on
    the horizontal axis is that of ``full``. Each part of the comparison, such as a corpus, has a chart if it has
    results of these protocols. If there are parts, the name of a protocol begins with the part, as in ``rfc full``.

    Args:
        results: Results of the runs, see `kerple.compare.finished_runs.Runs`.
    """
    results = results[results["metric"] == "ppl"]
    losses = results.pivot(index=["length", "strategy", "seed"], columns="protocol", values="value").apply(np.log)
    for own in (protocol for protocol in map(str, losses) if "far_own" in protocol):
        part = own.rpartition(" ")[0]
        runs = losses.reindex(columns=[f"{part} full".strip(), own.replace("far_own", "far_none"), own]).dropna()
        if runs.empty:
            continue
        length = runs.index.get_level_values("length").max()
        runs = runs.loc[length].set_axis(["x", "none", "own"], axis=1).eval("y = none - own").reset_index()
        # without runs with a much larger loss or a large negative gain, small gains are visible
        points = runs[(runs["x"] < runs["x"].min() + 0.4) & (runs["y"] >= -max(runs["y"].max(), 0.01))]
        points = points.assign(low=np.nan, high=np.nan, text="seed " + points["seed"].astype(str))
        left_out = len(runs) - len(points)
        yield Chart(
            f"loss-and-gain{part and f'-{part}'}",
            f"Gain from distant text and loss{part and f', {part}'}",
            [Panel("", points, f"loss at {length:,} tokens (nats per token), lower is better")],
            "gain from distant text (nats per token);\n0: distant text does not lower the loss",
            note="one point per run" + f";\n{left_out} runs with larger losses\nare not shown" * bool(left_out),
            zero=True,
            lines=False,
        )


def context_charts(table: pd.DataFrame | None, strategies: pd.Series, column: str) -> Iterator[Chart]:
    """Yield charts of the loss by position, or of the context gain (windowed - full loss) by distance from the window.

    Each part of the comparison, such as a corpus, has its own chart.

    Bands are 95% intervals over seeds and segments; a single seed has no band. Segments of one document are not
    independent, so a band can be too narrow. Intervals in tables are over documents or groups of documents. In
    results/earlier/since-2023, the standard error of ALiBi's loss over documents is 1.7 times that over segments. For
    the gain, the ratio is 0.8 to 1.5, depending on the distance.

    Args:
        table: A row for each run and bin of positions; None for no charts. The columns are

            - ``strategy``, ``seed``, and ``part`` if the comparison has parts,
            - ``first``: first position of the bin,
            - ``length`` of the segments, ``window`` of the windowed attention, and number of ``segments``,
            - ``loss`` and ``gain``: means over segments, with standard errors ``loss_error`` and ``gain_error``.
        strategies: Labels of the strategies to show.
        column: ``loss`` or ``gain``.
    """
    if table is None:
        return
    table = table[table["strategy"].isin(strategies)]
    table = table[table["first"] >= table["window"]] if column == "gain" else table
    for part, of_part in by_part(table):
        rows = []
        for strategy, of_strategy in of_part.groupby("strategy", sort=False):
            for x, found in curve(of_strategy, column):
                low, high = found.interval()
                text = format_estimate("+.4f" if column == "gain" else ".4f", found.mean, low, high)
                rows.append({"strategy": strategy, "x": x, "y": found.mean, "low": low, "high": high, "text": text})
        points, windows = pd.DataFrame(rows), of_part["window"].unique()
        note = INTERVAL * (of_part["seed"].nunique() > 1)
        file, title = (f"-{part}", f", {part}") if part else ("", "")
        if column == "gain":
            file, title = f"context-gain{file}", f"Context gain by distance{title}"
            tokens = f"{windows[0]} tokens" if len(windows) == 1 else "tokens"
            panel = Panel("", points, f"distance beyond the {tokens} of the window", log=True)
            top = max(0.005, points["y"][np.isfinite(points["y"])].max())
            ends = points[["y", "low", "high"]].min().min(), points[["y", "low", "high"]].max().max()
            limits = max(-3 * top, ends[0] - top / 20), min(4 * top, ends[1] + top / 20)
            label = "windowed - full (nats per token);\n> 0: text beyond the window lowers the loss"
            yield Chart(file, title, [panel], label, limits, note, zero=True)
        else:
            file, title = f"loss-by-position{file}", f"Loss by position{title}"
            mark = (int(windows[0]), "window") if len(windows) == 1 else None
            panel = Panel("", points, "position in the segment", mark=mark)
            # the first tokens have little context and a high loss
            losses = points["y"][points["x"] >= windows.min() / 2]
            ends = losses.min() - 0.1, min(losses.max(), losses.min() + 1) + 0.1
            label, bounds = "mean loss (nats per token)", ends if np.isfinite(ends[0]) else None
            yield Chart(file, title, [panel], label, bounds, note)


def curve(table: pd.DataFrame, column: str) -> Iterator[tuple[float, Estimate]]:
    """Yield the points of one strategy's curve: the horizontal coordinate of each point, and its estimate.

    For the loss, bins are merged into `POINTS` bins of equal width. For the gain, they are merged by distance beyond
    the window into `PER_OCTAVE` bins per octave. The standard error of a merged bin is set to the mean of the standard
    errors of its bins. Whatever the correlation of the bins, the true standard error is not larger.

    Args:
        table: The rows of the strategy, of all seeds, see `context_charts`.
        column: ``loss`` or ``gain``.
    """
    width = int(np.diff(np.unique(table["first"])).min()) if table["first"].nunique() > 1 else 1
    middle = table["first"] + width / 2
    if column == "gain":
        middle = middle - table["window"]
        groups = np.floor(np.log2(middle) * PER_OCTAVE)
    else:
        groups = middle // (table["length"] / POINTS)
    for _, group in table.assign(middle=middle).groupby(groups):
        by_seed = group.groupby("seed")[[column, f"{column}_error"]].mean()
        segments = int(group["segments"].min())
        # all seeds read the same text, so more seeds do not reduce its variance
        variance = float((by_seed[f"{column}_error"] ** 2).mean())
        found = estimate(over_seeds(by_seed[column]))
        found = replace(found, text_variance=variance, blocks=segments, text_freedom=segments - 1)
        yield float(group["middle"].mean()), found


def training_charts(runs: Runs) -> Iterator[Chart]:
    """Yield charts of training loss, validation loss and speed against the step.

    Without these curves, such as for records of old versions, yield a chart of the median speed of each run.
    """
    curves, costs = runs.analyses.get("training", pd.DataFrame()), runs.costs
    for column, title in CURVES.items():
        label = "tokens per second" if column == "tokens_per_second" else "nats per token"
        if column in curves:
            keys = [key for key in ("part", "strategy", "step") if key in curves]
            by_step = curves.dropna(subset=column).sort_values("step", kind="stable").groupby(keys, sort=False)[column]
            points = with_deviation(by_step.agg(["mean", "std"]).reset_index().assign(text=""))
            panels = [Panel(part, of_part.assign(x=of_part["step"]), "step") for part, of_part in by_part(points)]
            note = DEVIATION * bool(points["std"].notna().any())
            yield Chart("", title, panels, label, note=note, log="loss" in column)
        elif column in costs and costs[column].notna().any():
            points = costs.assign(x=costs[column], y=costs["strategy"], low=None, high=None)
            points["text"] = "seed " + points["seed"].astype(str)
            panels = [Panel(part, of_part, label) for part, of_part in by_part(points)]
            yield Chart("", title, panels, "", note="one point per run", lines=False)
