"""The figure of the findings: dilution in the runs of `main`, in three panels."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kerple.compare.figures import plain, styles_of
from results.judge.evidence import Tier, flattest_heads
from results.judge.statements import correlation, evaluate

STRATEGIES = ("KerpleLog", "ALiBi", "FoX", "RNoPE-SWA", "RNoPE-SWA temperature", "LearnedRelativeBias")
NOTE = (
    "bands: 95% intervals (left panel: of the difference from 4×); not shown: RoPE (too high), KERPLE-power (like FoX)"
)
TIMES = (4, 8, 16)
CONFIG = Path(__file__).parents[2] / "configs/compare/main.yaml"


def draw_dilution(tier: Tier, path: Path) -> None:
    """Draw own loss and disturbance against length, and the gain against the bias of the flattest head.

    Bands are 95% intervals over seeds and packages: of the difference between the loss at a length and at 4×, and of
    the disturbance. All losses are those of the last 64 targets of the same blocks.

    Args:
        tier: The runs of `main`.
        path: Path of the PNG file.
    """
    styles = styles_of(pd.Series(list(yaml.safe_load(CONFIG.read_text())["strategies"])))  # those of the report
    figure = Figure(figsize=(10.4, 3.5), layout="constrained")
    own, disturbance, head = figure.subplots(1, 3)
    for strategy in STRATEGIES:
        style = styles[strategy]
        none, *means = [float(tier.losses(strategy, name, 128 * n).of_seed.mean()) for name, n in _cells()]
        rises = [evaluate(f"own:{strategy}[{n}x] / own:{strategy}[4x]", tier).estimate for n in TIMES]
        intervals = np.array([rise.interval() for rise in rises])
        own.plot([1, *TIMES], [none, *means], label=strategy, markersize=4, **style)
        own.fill_between(TIMES, *(means[0] + intervals.T), color=style["color"], alpha=0.15, linewidth=0)
        found = [evaluate(f"foreign:{strategy}[{n}x] / none:{strategy}[{n}x]", tier).estimate for n in TIMES]
        disturbance.plot(TIMES, [each.mean for each in found], markersize=4, **style)
        ends = np.array([each.interval() for each in found]).T
        disturbance.fill_between(TIMES, *ends, color=style["color"], alpha=0.15, linewidth=0)
    _draw_flattest_head(head, tier, styles["KerpleLog"])
    for axes, ticks in ((own, ["none", "4×", "8×", "16×"]), (disturbance, ["4×", "8×", "16×"])):
        axes.set_xscale("log", base=2)
        axes.set_xticks([1, *TIMES] if len(ticks) == 4 else TIMES, ticks)
        axes.minorticks_off()
    own.set(
        title="loss with the target's own distant text",
        xlabel="length / training length; none: no distant text",
        ylabel="nats per token",
    )
    disturbance.set(title="rise of the loss by foreign text", xlabel="length / training length", ylim=(0, None))
    for axes in (own, disturbance, head):
        axes.title.set_fontsize(10)
        plain(axes)
    figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=9, handlelength=3.2, title=NOTE)
    figure.savefig(path, dpi=130, metadata={"Software": None})


def _cells() -> list[tuple[str, int]]:
    """Protocol and length in training lengths of each point of the first panel. *none* is equal at every length."""
    return [("far_none", TIMES[0]), *(("far_own", n) for n in TIMES)]


def _draw_flattest_head(axes: Axes, tier: Tier, style: dict[str, Any]) -> None:
    bias, gain = flattest_heads(tier, "KerpleLog")
    axes.plot(bias, gain, linestyle="", marker=style["marker"], color=style["color"])
    axes.set(title=f"KERPLE-log, {len(bias)} seeds: r = {correlation(bias, gain)[0]:.2f}".replace("-0", "−0"))
    axes.set(xlabel="bias of the flattest head at distance 2,047", ylabel="gain at 16× (nats per token)")
