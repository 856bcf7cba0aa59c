"""The report of a comparison: a folder of tables, figures and a page, which needs the runs no longer."""

import base64
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from markupsafe import Markup
from matplotlib.figure import Figure

from kerple.base.templates import render_template
from kerple.compare import tables
from kerple.compare.analyses import analyses
from kerple.compare.context_gain import context_figures
from kerple.compare.figures import figures, loss_and_gain, save
from kerple.compare.findings import findings
from kerple.compare.markup import Table, without_tags
from kerple.compare.page_data import page_figures
from kerple.compare.print_figures import write_print_figures
from kerple.compare.runs import LOCATIONS, Run, Runs
from kerple.compare.statistics import CELL, in_tokens, summarise

LATEX_HEAD = "% \\usepackage{booktabs,graphicx}\n"
PROTOCOLS = {
    "full": "non-overlapping segments of the length, every target scored, attention unrestricted (the paper's)",
    "windowed": "as full, attention limited to the last w keys in every layer; the name carries w",
    "keep_first": "as windowed, and the first tokens of the segment are seen too; the name carries their number",
    "sliding": "context cut to the length, the window moves by s tokens, only new targets are scored; the name has s",
    "last": "as full, but only the last k targets of each segment are scored; the name carries k",
    "longppl": "as full, over the key tokens alone, which an evaluator finds by their gain from a long context",
    "far_": "the last k targets of blocks after their own text of the length, after only the last of it, as long as in "
    "training (none), and with distant text of another document (foreign); the name carries k",
    "niah": "what a text of the length says somewhere is asked for at its end",
}
POSITIONAL = ("model.position", "model.scaling", "model.factor")  # settings; the last two are of pretrained models
PRIVATE = ("seed_everything", "run_dir", "config", "ckpt_path")  # settings that differ from run to run


def write(
    runs: Runs,
    folder: Path,
    *,
    name: str,
    baseline: str,
    missing: list[str] | None = None,
    deviations: list[str] | None = None,
    printed: Sequence[str] | None = None,
    events: Path | None = None,
) -> Path:
    """Write the report of finished runs.

    It writes ``results.csv`` (a row for each run and cell, with the same bytes for the same runs), ``summary.csv``
    (statistics), ``costs.csv``, a CSV file for each analysis, ``table.md``, ``table.tex``, figures as PNG and SVG, and
    ``report.html``, which needs no other file.

    Args:
        runs: The runs, as `kerple.compare.runs.read_runs` returns them.
        folder: Folder of the report, which is made if needed; files of the same names are replaced.
        name: Name of the comparison.
        baseline: The strategy against which the others are tested.
        missing: Runs of the comparison that are not finished; the report names them.
        deviations: Differences from the comparison's plan; the first line of the report.
        printed: Strategies in figures for print, which are written to ``paper/*.pdf``; all if it is empty, no such
            figures for None.
        events: Folder of TensorBoard's events, in place of which the figures and the tables are written; None for none.

    Returns:
        The path of report.html.

    Raises:
        UserError: If the baseline has no results, a metric is unknown, or a strategy in ``printed`` has no run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    summary = summarise(runs.results, baseline, blocks=runs.blocks)
    for file, table in {"results": runs.results, "summary": summary, "costs": runs.costs, **runs.analyses}.items():
        if not table.empty:
            digits = None if file == "results" else "%.8g"
            table.to_csv(folder / f"{file}.csv", index=False, float_format=digits)

    # of far context the tables have differences; losses of so few targets do not belong beside those of all
    shown = summary[~summary["protocol"].str.contains(r"\bfar_")]
    summary = summary if shown.empty else shown
    if printed is not None:
        write_print_figures(summary, runs, printed, baseline, folder / "paper")
    main, details = _tables(summary, runs, baseline)
    differences = inconsistencies(runs)
    warning = (
        f"Runs differ in more than strategy and seed: {without_tags('; '.join(differences))}.\n\n"
        if differences
        else ""
    )
    otherwise = f"Not as planned: {'; '.join(deviations)}.\n\n" if deviations else ""
    markdown = f"{otherwise}# {without_tags(name)}\n\n{warning}" + "\n".join(
        table.markdown() for table in (*main, *details)
    )
    (folder / "table.md").write_text(markdown, encoding="utf-8")
    latex = "\n".join([LATEX_HEAD, *(table.latex() for table in (*main, *details))])
    (folder / "table.tex").write_text(latex, encoding="utf-8")
    drawings = dict(figures(summary, runs.trained, baseline))
    drawings |= loss_and_gain(runs.results, summary["strategy"])
    if "context_gain" in runs.analyses:
        drawings |= context_figures(runs.analyses["context_gain"], summary["strategy"])
    images = {figure: save(drawing, folder, figure) for figure, drawing in drawings.items()}

    if events is not None:
        _show_in_tensorboard(events, drawings, "\n".join(table.markdown() for table in main))
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
        alike=_only_positions_differ(runs),
        environments=_environments(runs),
        common=yaml.safe_dump(common, sort_keys=False),
        differing=differing,
        missing=missing or [],
        deviations=deviations or [],
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _show_in_tensorboard(folder: Path, drawings: Mapping[str, Figure], tables: str) -> None:
    """Write the figures and the tables of a comparison as TensorBoard's images and text, in place of earlier ones."""
    from torch.utils.tensorboard import SummaryWriter  # takes seconds

    for earlier in folder.glob("events.*"):
        earlier.unlink()
    with SummaryWriter(str(folder)) as writer:
        for name, figure in drawings.items():
            writer.add_figure(f"comparison/{name}", figure, close=False)
        writer.add_text("comparison/tables", tables)


def _shipped(file: str) -> str:
    return resources.files("kerple.compare").joinpath(file).read_text(encoding="utf-8")


def _tables(summary: pd.DataFrame, runs: Runs, baseline: str) -> tuple[list[Table], list[Table]]:
    """The main tables, and the tables of details."""
    main: list[Table | None] = []
    details: list[Table | None] = []
    for metric, of_metric in summary.groupby("metric", sort=False):
        main.append(tables.tasks(runs.results, str(metric), runs.trained))
        for protocol, cells in of_metric.groupby("protocol", sort=False):
            trained = runs.trained[str(protocol)]
            # with one tokenizer, bits per byte say the same as perplexity, so they are details
            section = details if metric == "bits_per_byte" else main
            if metric == "ppl" and str(protocol).split()[-1].startswith("windowed"):
                main.append(tables.context_gain_table(summary, runs.blocks, str(protocol), trained))
            section.append(tables.comparison(cells, trained, baseline))
            details.append(tables.intervals(cells, trained, baseline))
    for own in (protocol for protocol in runs.trained if "far_own" in protocol):
        main += tables.far_context(summary, runs.blocks, own, runs.trained[own])
    main.append(tables.costs(runs.costs))
    details += analyses({name: table for name, table in runs.analyses.items() if name != "context_gain"})
    return [table for table in main if table], [table for table in details if table]


def inconsistencies(runs: Runs) -> list[str]:
    """Describe differences between runs that make a comparison meaningless; none if it is sound.

    These are settings, other than the seed, in which runs of one strategy differ, because their mean has no meaning;
    and differences between tests in what or how much they scored, because strategies then differ by more than their
    positions.
    """
    inconsistencies = []
    members: dict[str, list[tuple[Run, dict[str, Any]]]] = {}
    for run, config in _public(runs).items():
        members.setdefault(run.label, []).append((run, config))
    for label, of_label in members.items():
        for key in dict.fromkeys(key for _, config in of_label for key in config):
            values = {str(config.get(key)) for _, config in of_label}
            if len(values) > 1 and not all(config.get(key) == run.seed for run, config in of_label):
                inconsistencies.append(f"{label}: {key}: {' | '.join(sorted(values))}")
    inconsistencies += [f"{protocol}: {' | '.join(text)}" for protocol, text in runs.text.items() if len(text) > 1]
    return inconsistencies + _precisions(runs) + _unequal(runs.results)


def _precisions(runs: Runs) -> list[str]:
    """The precisions of training if there are several, with the runs of all but the most frequent one."""
    members: dict[str, list[str]] = {}
    for run, environment in runs.environments.items():
        if "precision" in environment:
            members.setdefault(environment["precision"], []).append(f"{run.label} seed {run.seed}")
    usual, *others = sorted(members, key=lambda precision: -len(members[precision])) or [""]
    odd = " | ".join(f"{precision} ({', '.join(members[precision])})" for precision in others)
    return [f"precision: {usual} | {odd}"] if odd else []


def _unequal(results: pd.DataFrame) -> list[str]:
    """Protocols that scored different numbers of targets in different runs, each at the first such length."""
    inconsistencies: dict[str, str] = {}
    for (_, protocol, length), group in results.groupby(CELL, sort=False):
        usual = group["count"].mode()[0]
        counts = [f"{usual:,.0f}"]
        for count, odd in group[group["count"] != usual].groupby("count", sort=False):
            names = (f"{strategy} seed {seed}" for strategy, seed in zip(odd["strategy"], odd["seed"], strict=True))
            counts.append(f"{count:,.0f} ({', '.join(names)})")
        if len(counts) > 1:
            inconsistencies.setdefault(str(protocol), f"{protocol} at {length}: scored per run: {' | '.join(counts)}")
    return list(inconsistencies.values())


def _only_positions_differ(runs: Runs) -> bool:
    firsts: dict[tuple[str, int], dict[str, Any]] = {}
    for run, config in _public(runs).items():
        first = firsts.setdefault((run.part, run.seed), config)
        if any(first.get(key) != config.get(key) for key in first | config if not key.startswith(POSITIONAL)):
            return False
    return True


def _protocols(runs: Runs) -> list[tuple[str, str, str, str]]:
    """Rows (protocol, meaning, lengths, targets) of all protocols in the report."""
    rows = []
    for protocol, group in runs.results.groupby("protocol", sort=False):
        name = str(protocol).split()[-1]
        meaning = next((text for start, text in PROTOCOLS.items() if name.startswith(start)), "task")
        counts = group.loc[group["metric"] != "bits_per_byte", "count"]  # those are bytes
        targets = "–".join(dict.fromkeys(f"{n:,.0f}" for n in (counts.min(), counts.max())))
        lengths = sorted(int(length) for length in group["length"].unique())
        many = f"{lengths[0]}–{lengths[-1]} ({len(lengths)} lengths)"
        shown = ", ".join(map(str, lengths)) if len(lengths) <= 16 else many
        rows.append((str(protocol), ". ".join([meaning, *runs.text.get(str(protocol), [])]), shown, targets))
    return rows


def _environments(runs: Runs) -> list[tuple[str, str]]:
    """Rows (entry, value) of versions and machines; if runs differ, all values are shown."""
    values: dict[str, dict[str, None]] = {}
    for environment in runs.environments.values():
        for key, value in environment.items():
            values.setdefault(key, {})[str(value)] = None
    return [(key, " | ".join(of_key)) for key, of_key in values.items()]


def _configs(runs: Runs) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """The configuration that all runs have in common, and each strategy's other settings."""
    configs = _public(runs)
    first = next(iter(configs.values()))
    common = {key: value for key, value in first.items() if all(c.get(key) == value for c in configs.values())}
    differing: dict[str, dict[str, str]] = {}
    for run, config in configs.items():  # the first seed of a strategy stands for all
        differing.setdefault(run.label, {key: str(value) for key, value in config.items() if key not in common})
    return common, differing


def _public(runs: Runs) -> dict[Run, dict[str, Any]]:
    """The configurations without seeds and directories, which differ from run to run."""
    return {
        run: {
            key: value
            for key, value in config.items()
            if value is not None and key not in PRIVATE and not LOCATIONS.fullmatch(key)
        }
        for run, config in runs.configs.items()
    }
