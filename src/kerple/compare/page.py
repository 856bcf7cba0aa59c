"""The report of a comparison: a folder of tables, figures and a page, which needs the runs no longer."""

import base64
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
import yaml
from markupsafe import Markup

from kerple.base.changes import is_default
from kerple.compare import tables
from kerple.compare.analyses import analyses
from kerple.compare.collect import RESULT, Run, Runs
from kerple.compare.context_gain import context_figures
from kerple.compare.figures import figures, position_wise, save
from kerple.compare.flat import flat
from kerple.compare.interactive import curves, library
from kerple.compare.statistics import in_tokens, summarise

LATEX_HEAD = "% \\usepackage{booktabs,graphicx}\n"
DRAWN = ("position_wise", "context_gain")  # analyses that are figures
PROTOCOLS = {
    "full": "non-overlapping segments of the length, every target scored, attention unrestricted (the paper's)",
    "windowed": "as full, attention limited to the last w keys in every layer; the name carries w",
    "sliding": "context cut to the length, the window moves by s tokens, only new targets are scored; the name has s",
    "last": "as full, but only the last k targets of each segment are scored; the name carries k",
    "per_position": "as full, the loss by position in the segment",
    "longppl": "as full, over the key tokens alone, which an evaluator finds by their gain from a long context",
    "niah": "what a text of the length says somewhere is asked for at its end",
}

POSITIONAL = ("model.position", "model.scaling", "model.factor")  # settings; the last two are of pretrained models
OLD_BYTES = (
    "Of an old version: an average token of the whole split stands for the bytes of each scored target, which is some "
    "per cent off where only a part of the split was scored; test the runs again."
)


def write(runs: Runs, folder: Path, *, name: str, baseline: str, missing: list[str] | None = None) -> Path:
    """Write the report of finished runs.

    It writes ``results.csv`` (a row for each run and cell, with the same bytes for the same runs), ``summary.csv``
    (statistics), ``costs.csv``, a CSV file for each analysis, ``table.md``, ``table.tex``, figures as PNG and SVG, and
    ``report.html``, which needs no other file.

    Args:
        runs: The runs, as `kerple.compare.collect.read` returns them.
        folder: Folder of the report, which is made if needed; files of the same names are replaced.
        name: Name of the comparison.
        baseline: The strategy against which the others are tested.
        missing: Runs of the comparison that are not finished; the report names them.

    Returns:
        The path of report.html.

    Raises:
        UserError: If the baseline has no results, or a metric is unknown.
    """
    folder.mkdir(parents=True, exist_ok=True)
    trained = runs.training_length
    summary = summarise(runs.results, baseline, blocks=runs.blocks)
    runs.results.to_csv(folder / "results.csv", index=False)
    summary.to_csv(folder / "summary.csv", index=False, float_format="%.8g")
    if not runs.costs.empty:
        runs.costs.to_csv(folder / "costs.csv", index=False, float_format="%.8g")
    for analysis, table in runs.analyses.items():
        table.to_csv(folder / f"{analysis}.csv", index=False, float_format="%.8g")

    main, details = _tables(summary, runs, baseline)
    title, differences = f"# {name}\n\n", mixed(runs)
    if differences:
        title += f"Runs differ in more than strategy and seed: {'; '.join(differences)}.\n\n"
    (folder / "table.md").write_text(title + "\n".join(t.markdown() for t in (*main, *details)))
    (folder / "table.tex").write_text("\n".join([LATEX_HEAD, *(t.latex() for t in (*main, *details))]))
    for stale in folder.glob("*-relative-to-*"):  # to what was the baseline when fewer runs were done
        stale.unlink()
    drawn = []
    found = list(figures(summary, runs.trained, baseline))
    if "position_wise" in runs.analyses:
        found += position_wise(runs.analyses["position_wise"], summary["strategy"], baseline)
    if "context_gain" in runs.analyses:
        found += context_figures(runs.analyses["context_gain"], summary["strategy"])
    for figure_name, figure in found:
        _, svg = save(figure, folder, figure_name)
        drawn.append((figure_name, f"data:image/svg+xml;base64,{base64.b64encode(svg.read_bytes()).decode()}"))

    common, differing = _configs(runs)
    template = resources.files("kerple.compare").joinpath("page.html.jinja").read_text()
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    script, style = library()
    page = environment.from_string(template).render(
        data=Markup(curves(summary, runs.results, runs.trained, baseline)),
        script=Markup(script),
        style=Markup(style),
        metrics=[tables.METRIC_NAMES.get(str(metric), str(metric)) for metric in summary["metric"].unique()],
        name=name,
        baseline=baseline,
        strategies=list(dict.fromkeys(runs.results["strategy"])),
        seeds=sorted(int(s) for s in runs.results["seed"].unique()),
        trained=trained,
        tokens=any(map(in_tokens, summary["metric"], summary["protocol"])),
        tables=main,
        details=details,
        figures=drawn,
        protocols=_protocols(runs),
        mixed=differences,
        alike=_only_positions_differ(runs),
        environments=_environments(runs),
        common=yaml.safe_dump(common, sort_keys=False),
        differing=differing,
        missing=missing or [],
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    path = folder / "report.html"
    path.write_text(page)
    return path


def _tables(summary: pd.DataFrame, runs: Runs, baseline: str) -> tuple[list[tables.Table], list[tables.Table]]:
    """The main tables, and the tables of details."""
    main: list[tables.Table] = []
    details: list[tables.Table] = []
    for metric, group in summary.groupby("metric", sort=False):
        protocols = list(dict.fromkeys(group["protocol"]))
        overview = tables.tasks(runs.results, str(metric), runs.trained)
        main += [overview] if overview else []
        for protocol in protocols:
            # with one tokenizer, bits per byte say the same as perplexity, so they are details
            place = details if metric == "bits_per_byte" else main
            table = tables.comparison(summary, str(metric), protocol, runs.trained[protocol], baseline)
            old = metric == "bits_per_byte" and runs.old_bytes
            place.append(replace(table, note=f"{table.note} {OLD_BYTES}") if old else table)
            interval = tables.intervals(summary, str(metric), protocol, runs.trained[protocol], baseline)
            details += [interval] if interval else []
            if metric == "ppl" and protocol.split()[-1].startswith("windowed"):
                distant = tables.distant(summary, runs, protocol, runs.trained[protocol])
                details += [distant] if distant else []
    cost = tables.costs(runs)
    details += analyses({name: table for name, table in runs.analyses.items() if name not in DRAWN})
    return main + ([cost] if cost else []), details


def mixed(runs: Runs) -> list[str]:
    """Describe differences between runs that make a comparison meaningless; none if it is sound.

    These are settings, other than the seed, in which runs of one strategy differ, because their mean has no meaning;
    and differences between tests in what or how much they scored, because strategies then differ by more than their
    positions.
    """
    complaints = []
    for label, members in _members(runs, lambda run: run.label).items():
        for key in dict.fromkeys(key for _, config in members for key in config):
            values = {str(config.get(key)): str(config.get(key, "not there")) for _, config in members}
            if len(values) == 1 or all(config.get(key) == run.seed for run, config in members):
                continue
            if not _is_newer(key, [config for _, config in members]):
                complaints.append(f"{label}: {key}: {' | '.join(values.values())}")
    ways = {protocol: found for protocol, found in runs.text.items() if len(found) > 1}
    complaints += [f"{protocol}: {' | '.join(found)}" for protocol, found in ways.items()]
    return complaints + _precisions(runs) + _unequal(runs.results)


def _is_newer(key: str, configs: list[dict[str, Any]]) -> bool:
    """Whether some runs were made before there was an option, and the others have its default: all did the same.

    Options of classes that the files name are left out: their defaults are not known without importing them.
    """
    later = [config for config in configs if key in config]
    return len(later) < len(configs) and key.count(".") == 1 and all(is_default(config, key) for config in later)


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
    complaints: dict[str, str] = {}
    for (_, protocol, length), group in results.dropna(subset="count").groupby(RESULT, sort=False):
        usual = group["count"].mode()[0]
        found = [f"{usual:,.0f}"]
        for count, odd in group[group["count"] != usual].groupby("count", sort=False):
            names = (f"{strategy} seed {seed}" for strategy, seed in zip(odd["strategy"], odd["seed"], strict=True))
            found.append(f"{count:,.0f} ({', '.join(names)})")
        if len(found) > 1:
            complaints.setdefault(str(protocol), f"{protocol} at {length}: scored per run: {' | '.join(found)}")
    return list(complaints.values())


def _only_positions_differ(runs: Runs) -> bool:
    for members in _members(runs, lambda run: f"{run.part} {run.seed}").values():
        (_, first), *others = members
        if any(first.get(k) != c.get(k) for _, c in others for k in first | c if not k.startswith(POSITIONAL)):
            return False
    return True


def _members(runs: Runs, key: Callable[[Run], str]) -> dict[str, list[tuple[Run, dict[str, Any]]]]:
    """Group the runs, with their flat configurations, by a key."""
    grouped: dict[str, list[tuple[Run, dict[str, Any]]]] = {}
    for run, config in runs.configs.items():
        grouped.setdefault(key(run), []).append((run, _public(config)))
    return grouped


def _protocols(runs: Runs) -> list[tuple[str, str, str, str]]:
    """Rows (protocol, meaning, lengths, targets) of all protocols in the report."""
    rows = []
    parts = dict.fromkeys(run.part for run in runs.configs)
    meanings = {f"{part} {name}".strip(): text for part in parts for name, text in PROTOCOLS.items()}
    for protocol, group in runs.results.groupby("protocol", sort=False):
        meaning = next((text for name, text in meanings.items() if str(protocol).startswith(name)), "task")
        counts = group.loc[group["metric"] != "bits_per_byte", "count"].dropna()  # those are bytes
        targets = "–".join(dict.fromkeys(f"{n:,.0f}" for n in (counts.min(), counts.max()) if n == n)) or "–"
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
    return [(key, " | ".join(found)) for key, found in values.items()]


def _configs(runs: Runs) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """The configuration that all runs have in common, nested, and each strategy's other settings, flat.

    Seeds and directories are left out, because they always differ.
    """
    configs = {run: _public(config) for run, config in runs.configs.items()}
    first = next(iter(configs.values()))
    shared = {k for k, v in first.items() if all(k in other and other[k] == v for other in configs.values())}
    common: dict[str, Any] = {}
    for key in (k for k in first if k in shared):
        *parents, leaf = key.split(".")
        place = common
        for parent in parents:
            place = place.setdefault(parent, {})
        place[leaf] = first[key]
    differing: dict[str, dict[str, str]] = {}
    for run, config in configs.items():
        differing.setdefault(run.label, {k: str(v) for k, v in config.items() if k not in shared})
    return common, differing


def _public(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration, flat, without seeds and directories."""
    return {key: value for key, value in flat(config).items() if not _private(key)}


def _private(key: str) -> bool:
    names = ("seed_everything", "run_dir", "config", "ckpt_path")
    return key in names or key.endswith(("save_dir", "dirpath", "root_dir"))
