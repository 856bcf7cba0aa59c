"""Writes docs/catalogue.md and its pictures from docstrings and committed results: ``python docs/catalogue.py``."""

import inspect
import re
from collections import defaultdict
from pathlib import Path

import matplotlib as mpl
import pandas as pd
import torch
import yaml
from matplotlib.figure import Figure

from kerple import positions
from kerple.compare import finished_runs, run_discovery
from kerple.compare.figures import COLOURS, plain, styles_of
from kerple.model import Transformer
from kerple.positions import Position, Shape
from kerple.positions.base import HOOKS

DOCS, RESULTS = Path(__file__).parent, Path(__file__).parents[1] / "results"
LENGTH = 128  # training length of the pictures and of main
WINDOWED = ("KerpleLog", "RNoPE-SWA")  # strategies with a curve for windowed attention in the figure of the README
WRITTEN = "<!-- written by docs/catalogue.py from here on -->\n"
KINDS = {  # title and hooks of each table; a strategy is listed in the first table with one of its hooks
    "Functions of distance and head": ("bias", "score_scale"),
    "Transformations of queries and keys": ("transform_qk",),
    "Gates on the output of attention": ("transform_output",),
    "Additions to the embeddings": ("embed",),
    "Functions of pairs of tokens": ("key_bias", "query_bias", "value_bias", "modify_scores", "add_to_output"),
    "No positions, or an additional logit": (),
    "Wrappers and combinations of other strategies": (),
}


def draw(strategy: type[Position], path: Path) -> None:
    """Draw the attention of the last of 256 equal tokens in an untrained first layer, by distance.

    Each curve is the logarithm of the attention in one head, relative to its maximum. If the strategy has a
    ``max_length`` below 256, there are ``max_length`` tokens.
    """
    torch.manual_seed(1)
    network = Transformer(Shape(64, 4, LENGTH), 4, 2, strategy, init=0.16).double().eval()
    tokens = torch.zeros(1, min(2 * LENGTH, network.positions[0].max_length or 2 * LENGTH), dtype=torch.long)
    curves: list[torch.Tensor] = []  # (T, H) of each layer
    network.visit_attention(tokens, lambda _, p: curves.append(p[0, :, -1].flip(-1).T))
    figure = Figure(figsize=(2.4, 1.2), layout="constrained")
    axes = figure.subplots()
    axes.axvline(LENGTH, color="grey", linewidth=0.8, linestyle=":")
    for curve, colour in zip((curves[0] / curves[0].amax(0)).log().clamp(min=-99).T, COLOURS, strict=False):
        axes.plot(curve, color=colour, linewidth=1.2)
    axes.set(xlim=(0, 2 * LENGTH), ylim=(-8, 0.5), xticks=[0, LENGTH, 2 * LENGTH], yticks=[0, -8])
    axes.tick_params(labelsize=7, color="grey", labelcolor="grey", length=2)
    axes.spines[:].set_color("none")
    figure.savefig(path, transparent=True, metadata={"Date": None})


def draw_hero(title: str) -> None:
    """Draw the figure of the README: perplexity in main against length. Much larger values lie outside the axes.

    Dotted curves are perplexities with a window of the training length in every layer. They fall too, because longer
    segments have fewer targets with little context.
    """
    figure = Figure(figsize=(7.6, 3.8), layout="constrained")
    axes = figure.subplots()
    runs = finished_runs.read_runs(run_discovery.recorded_runs(RESULTS / "main"))
    results = runs.results.query("metric == 'ppl' and protocol == 'full'")
    means = results.pivot_table(index="length", columns="strategy", values="value").sort_values(2048, axis=1)
    windowed = runs.results.query("metric == 'ppl' and protocol == 'windowed128'")
    windowed = windowed.pivot_table(index="length", columns="strategy", values="value")
    planned = yaml.safe_load((RESULTS.parent / "configs/compare/main.yaml").read_text())["strategies"]
    styles = styles_of(pd.Series(list(planned)))  # those of the report
    bottom, top = 0.96 * means.min().min(), 1.04 * means.iloc[0].max()
    y = 0.0
    for label in means:
        axes.plot(means[label], markersize=4, **styles[label])
        last = means[label].iloc[-1]
        y = min(max(last, y + 0.042 * (top - bottom)), 0.98 * top)  # labels do not overlap
        look = {"color": styles[label]["color"], "size": "small", "va": "center"}
        axes.text(1.15 * means.index[-1], y, label if last < top else f"{label}: {last:.0f}", **look)
        if last < top:
            axes.plot([means.index[-1], 1.13 * means.index[-1]], [last, y], color=look["color"], linewidth=0.8)
    for label in WINDOWED:
        axes.plot(windowed[label], color=styles[label]["color"], linewidth=1, linestyle=":")
    axes.plot([], [], color="grey", linewidth=1, linestyle=":", label=f"only the last {LENGTH} keys in each layer")
    axes.legend(handles=axes.lines[-1:], loc="lower left", frameon=False, fontsize="small")
    axes.set(xscale="log", title=title, xlabel="tokens that the model reads at once", ylabel="perplexity")
    axes.set(xticks=list(means.index), xticklabels=list(means.index), ylim=(bottom, top))
    axes.set_xlim(right=2.4 * means.index[-1])
    axes.minorticks_off()
    plain(axes)
    figure.savefig(DOCS / "figures/hero.png", dpi=150, metadata={"Software": None})


def full_below_windowed() -> dict[str, list[str]]:
    """Return phrases by class name on the longest length up to which full attention has no higher perplexity than
    attention with a window of the training length. Lengths are in training lengths. Comparisons with 0.6M tokens are
    left out."""
    comparisons = defaultdict(list)
    for comparison in ("main", "earlier/beyond-128", "earlier/table3", "earlier/since-2023"):
        read = finished_runs.read_runs(run_discovery.recorded_runs(RESULTS / comparison))
        classes = {run.strategy: c["model.position.class_path"].rpartition(".")[2] for run, c in read.configs.items()}
        ppl = read.results.query("metric == 'ppl' and length >= @read.training_length")
        for label, rows in ppl.query("strategy != 'PoPE'").groupby("strategy"):  # was trained with another sign
            means = rows.groupby(["protocol", "length"])["value"].mean()
            full, windowed = (means.get(name) for name in ("full", f"windowed{read.training_length}"))
            if windowed is None:
                continue
            times = full.index[(full <= windowed + 1e-9).cummin()][-1] // full.index[0]
            result = f"{times}×" if label == classes[label] else f"*{label}* {times}×"
            link = f"[{comparison.removeprefix('earlier/')}](../results/{comparison}/table.md)"
            comparisons[classes[label], result].append(link)
            if label in positions.names() and label != classes[label]:  # a combination named after a part
                comparisons[label, f"{times}× in `{classes[label]}`"].append(link)
    phrases = defaultdict(list)
    for (name, result), links in comparisons.items():
        phrases[name].append(f"{result} ({', '.join(links)})")
    return phrases


def row(strategy: type[Position], phrases: list[str]) -> str:
    """Return the table row of a strategy: picture, first paragraph, formula, paper, parameters, cost and phrases."""
    name, text = strategy.__name__, inspect.getdoc(strategy) or ""
    summary, *rest = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    parameters = next(paragraph for paragraph in rest if paragraph.startswith("Parameters:"))
    literals = re.findall(r"``[^`]+``", " ".join(rest))  # one pass, so that no match starts at the end of another
    formulas = [] if "``" in summary else [literal for literal in literals if re.search("[·+=]", literal)]
    source = f"{text} {inspect.getmodule(strategy).__doc__}"
    papers = [] if "arXiv" in summary else re.findall(r"arXiv\s[\d.]+\d", source)
    facts = parameters.replace(" Cost:", "\nCost:").split("\n")
    facts += [f"Full ≤ windowed: {', '.join(phrases)}."] * bool(phrases)
    cell = "<br>".join([f"**{name}**. {summary}", *formulas[:1], *papers[:1], *facts])
    cell = re.sub(r"arXiv\s([\d.]+\d)", r"[arXiv \1](https://arxiv.org/abs/\1)", cell)
    return f"| ![{name}](figures/strategies/{name}.svg) | {cell} |"


if __name__ == "__main__":
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "kerple"}
    (DOCS / "figures/strategies").mkdir(exist_ok=True)
    tables, phrases = dict.fromkeys(KINDS, ""), full_below_windowed()
    for name, strategy in positions.strategies().items():
        draw(strategy, DOCS / f"figures/strategies/{name}.svg")
        *_, no_positions, wrappers = KINDS
        overridden = {hook for hook in HOOKS if getattr(strategy, hook) is not getattr(Position, hook)}
        kind = next((kind for kind, hooks in KINDS.items() if overridden & set(hooks)), no_positions)
        wraps = any("Shape" in str(p.annotation) for p in list(inspect.signature(strategy).parameters.values())[1:])
        tables[wrappers if wraps else kind] += row(strategy, phrases[name]) + "\n"
    head = (DOCS / "catalogue.md").read_text(encoding="utf-8").split(WRITTEN)[0] + WRITTEN
    page = [f"\n## {kind}\n\n| attention | strategy |\n|---|---|\n{rows}" for kind, rows in tables.items()]
    (DOCS / "catalogue.md").write_text(head + "".join(page), encoding="utf-8")
    draw_hero("Trained on inputs of 128 tokens, tested on up to 2,048")
