"""The report of a comparison: a folder with tables, figures and a page. It can be read without the runs."""

import base64
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from markupsafe import Markup

from kerple.base.atomic import refuse_links_out
from kerple.base.templates import render_template
from kerple.compare import tables
from kerple.compare.context_gain_figures import context_figures
from kerple.compare.figures import figures, loss_and_gain, save
from kerple.compare.findings import findings
from kerple.compare.finished_runs import Runs
from kerple.compare.inconsistencies import inconsistencies, only_positions_differ, public_configs
from kerple.compare.measure_tables import analyses
from kerple.compare.page_data import page_figures
from kerple.compare.print_figures import write_print_figures
from kerple.compare.statistics import in_tokens, summarise
from kerple.compare.table_markup import Table, without_tags

LATEX_HEAD = "% \\usepackage{booktabs,graphicx}\n"
PROTOCOLS = {  # meaning of a protocol, by the beginning of its name
    "full": "non-overlapping segments of the length, every target scored, unrestricted attention (as in the paper)",
    "windowed": "full with attention limited to the last w keys in every layer; the name contains w",
    "keep_first": "windowed, and every query also sees the first n tokens of its segment; the name contains n",
    "sliding": "context limited to the length; the window moves by s tokens, and only new targets are scored; the name "
    "contains s",
    "last": "full, but only the last k targets of each segment are scored; the name contains k",
    "longppl": "full, but only key tokens are scored; an evaluator model selects them by their gain from long context",
    "far_": "only the last k targets of each block are scored; own: the model reads the last L tokens of the block, "
    "where L is the length; none: it reads only the last T tokens, where T is the training length; foreign: it reads "
    "L - T tokens of another document, and then the last T tokens of the block; the name contains k",
    "niah": "retrieve a fact hidden in a text of the length",
}


def write_comparison(
    runs: Runs,
    folder: Path,
    *,
    name: str,
    baseline: str,
    missing: Sequence[str] = (),
    deviations: Sequence[str] = (),
    printed: Sequence[str] | None = None,
) -> Path:
    """Write the report of finished runs.

    The files are ``results.csv`` (a row for each run, metric, protocol and length), ``summary.csv`` (statistics),
    ``costs.csv``, a CSV file for each analysis, ``table.md``, ``table.tex``, figures as PNG and SVG, and
    ``report.html``, which needs no other file. The files are deterministic, except for the time in ``report.html``.

    Args:
        runs: The runs, see `kerple.compare.finished_runs.read_runs`.
        folder: Folder of the report, which is created if it does not exist. Files of the same names are replaced.
        name: Title of the report.
        baseline: The strategy with which the others are compared.
        missing: Names of unfinished runs, which the page lists.
        deviations: Differences from the comparison's plan, which are the first line of the report.
        printed: Labels of the strategies in the PDFs ``paper/*.pdf``; empty for all strategies, None for no PDFs.

    Returns:
        The path of report.html.

    Raises:
        UserError: If the baseline has no results, a metric is not known, a strategy in ``printed`` has no run, or the
            folder contains a link to a place outside it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    refuse_links_out("output", folder)
    summary = summarise(runs.results, baseline, blocks=runs.blocks)
    for file, table in {"results": runs.results, "summary": summary, "costs": runs.costs, **runs.analyses}.items():
        if not table.empty:
            table.to_csv(folder / f"{file}.csv", index=False, float_format=None if file == "results" else "%.8g")

    # the protocols far_… score few targets, so their losses are not comparable with `full`; only differences are shown
    shown = summary[~summary["protocol"].str.contains(r"\bfar_")]
    summary = summary if shown.empty else shown
    if printed is not None:
        write_print_figures(summary, runs, printed, baseline, folder / "paper")
    main, details = _tables(summary, runs, baseline)
    differences = inconsistencies(runs)
    title = [f"Not as planned: {'; '.join(deviations)}.\n"] if deviations else []
    title.append(f"# {without_tags(name)}\n")
    if differences:
        title.append(f"Runs differ in more than strategy and seed: {without_tags('; '.join(differences))}.\n")
    markdown = "\n".join([*title, *(table.markdown() for table in main + details)])
    (folder / "table.md").write_text(markdown, encoding="utf-8")
    latex = "\n".join([LATEX_HEAD, *(table.latex() for table in main + details)])
    (folder / "table.tex").write_text(latex, encoding="utf-8")
    drawings = dict(figures(summary, runs.training_lengths, baseline))
    drawings |= loss_and_gain(runs.results, summary["strategy"])
    drawings |= context_figures(runs.analyses.get("context_gain"), summary["strategy"])
    images = {figure: save(drawing, folder, figure) for figure, drawing in drawings.items()}

    common, differing = _configs(runs)
    data = {"baseline": baseline, "figures": page_figures(summary, runs)}
    page = render_template(
        "kerple.compare",
        "page.html.jinja",
        data=Markup(json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")),
        script=Markup(_shipped("uPlot/uPlot.iife.min.js") + _shipped("page.js")),
        style=Markup(_shipped("uPlot/uPlot.min.css")),
        plots=data["figures"],
        findings=list(findings(summary, runs, baseline)),
        name=name,
        baseline=baseline,
        strategies=list(dict.fromkeys(runs.results["strategy"])),
        seeds=sorted(int(s) for s in runs.results["seed"].unique()),
        trained=runs.training_length,
        tokens=any(map(in_tokens, summary["metric"], summary["protocol"])),
        tables=main,
        details=details,
        figures={figure: base64.b64encode(svg.read_bytes()).decode() for figure, svg in images.items()},
        protocols=_protocols(runs),
        mixed=differences,
        alike=only_positions_differ(runs),
        environments=_environments(runs),
        common=yaml.safe_dump(common, sort_keys=False),
        differing=differing,
        missing=missing,
        deviations=deviations,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _shipped(file: str) -> str:
    """Read a file of this package."""
    return resources.files("kerple.compare").joinpath(file).read_text(encoding="utf-8")


def _tables(summary: pd.DataFrame, runs: Runs, baseline: str) -> tuple[list[Table], list[Table]]:
    """The tables of the section Results, and those of the section Details."""
    main: list[Table | None] = []
    details: list[Table | None] = []
    strategies = summary["strategy"]
    for metric, of_metric in summary.groupby("metric", sort=False):
        main.append(tables.task_table(runs.results, str(metric), runs.training_lengths))
        for protocol, cells in of_metric.groupby("protocol", sort=False):
            trained = runs.training_lengths[str(protocol)]
            # bits per byte are in Details, because with one tokenizer they rank the strategies like perplexity
            section = details if metric == "bits_per_byte" else main
            if metric == "ppl" and "far_own" not in str(protocol):  # the tables of far_own are added below
                main += tables.difference_tables(runs.blocks, strategies, str(protocol), trained)
            section.append(tables.metric_table(cells, trained, baseline))
            details.append(tables.ratio_table(cells, trained, baseline))
    for own in (protocol for protocol in runs.training_lengths if "far_own" in protocol):
        main += tables.difference_tables(runs.blocks, strategies, own, runs.training_lengths[own])
    main.append(tables.cost_table(runs.costs))
    details += analyses({name: table for name, table in runs.analyses.items() if name != "context_gain"})
    return [table for table in main if table], [table for table in details if table]


def _protocols(runs: Runs) -> list[tuple[str, str, str, str]]:
    """Rows (protocol, meaning, lengths, number of targets per run) of all protocols in the report."""
    rows = []
    for protocol, group in runs.results.groupby("protocol", sort=False):
        name = str(protocol).split()[-1]
        meaning = next((text for start, text in PROTOCOLS.items() if name.startswith(start)), "task")
        # the counts of bits per byte are numbers of bytes
        targets = tables.format_range(group.loc[group["metric"] != "bits_per_byte", "count"])
        lengths = sorted(int(length) for length in group["length"].unique())
        many = f"{lengths[0]}–{lengths[-1]} ({len(lengths)} lengths)"
        shown = ", ".join(map(str, lengths)) if len(lengths) <= 16 else many
        description = ". ".join([meaning, *runs.text_descriptions.get(str(protocol), [])])
        rows.append((str(protocol), description, shown, targets))
    return rows


def _environments(runs: Runs) -> list[tuple[str, str]]:
    """Rows (entry, value) of versions and machine. If runs differ in an entry, all its values are listed."""
    environments = runs.environments.values()
    keys = dict.fromkeys(key for environment in environments for key in environment)
    return [(key, " | ".join(dict.fromkeys(str(e[key]) for e in environments if key in e))) for key in keys]


def _configs(runs: Runs) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """The options that are equal in all runs, and the other options of each part and strategy."""
    configs = public_configs(runs)
    first, *others = configs.values()
    common = {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
    differing: dict[str, dict[str, str]] = {}
    for run, config in configs.items():  # the first seed stands for all seeds of a strategy
        differing.setdefault(run.label, {key: str(value) for key, value in config.items() if key not in common})
    return common, differing
