"""The report of a comparison: a folder with tables, figures and a page. It can be read without the runs."""

import base64
import gzip
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from markupsafe import Markup

from kerple.base.atomic import refuse_links_out
from kerple.base.templates import render_template
from kerple.compare import tables
from kerple.compare.charts import Chart, Panel, charts
from kerple.compare.figures import check_printed, styles_of, write_figures, write_print_figures
from kerple.compare.findings import findings, power_of_the_tests
from kerple.compare.finished_runs import Runs
from kerple.compare.inconsistencies import inconsistencies, only_positions_differ, public_configs
from kerple.compare.measure_tables import analyses
from kerple.compare.stages import stage_tables
from kerple.compare.statistics import summarise
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
    "gap": "only the last k targets of a block are scored, and their positions follow those of its beginning after a "
    "gap, which the length includes; the name contains k",
    "no_context": "the targets of gap, without the beginning of the block; the name contains k",
    "niah": "retrieve a fact hidden in a text of the length",
}
DRAWN_ANALYSES = ("context_gain", "training")  # analyses that have charts instead of tables


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
    check_printed(summary, printed or [])  # before the first file is replaced
    for file, table in {"results": runs.results, "summary": summary, "costs": runs.costs, **runs.analyses}.items():
        if not table.empty:
            table.to_csv(folder / f"{file}.csv", index=False, float_format=None if file == "results" else "%.8g")

    # the protocols far_… score few targets, so their losses are not comparable with `full`; only differences are shown
    shown = summary[~summary["protocol"].str.contains(r"\bfar_")]
    report = Report(name, baseline, runs, summary if shown.empty else shown, missing, deviations)
    if printed is not None:
        write_print_figures(report.summary, runs, printed, baseline, folder / "paper")
    title = [f"Not as planned: {'; '.join(deviations)}.\n"] if deviations else []
    title.append(f"# {without_tags(name)}\n")
    if differences := inconsistencies(runs):
        title.append(f"Runs differ in more than strategy and seed: {without_tags('; '.join(differences))}.\n")
    all_tables = [*report.tables[0], *report.tables[1]]
    markdown = "\n".join([*title, *(table.markdown() for table in all_tables)])
    (folder / "table.md").write_text(markdown, encoding="utf-8")
    latex = "\n".join([LATEX_HEAD, *(table.latex() for table in all_tables)])
    (folder / "table.tex").write_text(latex, encoding="utf-8")
    write_figures(report.charts, report.summary["strategy"], folder)
    path = folder / "report.html"
    only_positions = not differences and only_positions_differ(runs)
    values = {"report": report, "inconsistencies": differences, "only_positions_differ": only_positions}
    values |= {"time": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")}
    path.write_text(render_template("kerple.compare", "page.html.jinja", **values), encoding="utf-8")
    return path


@dataclass(frozen=True)
class Report:
    """The content of a report. Its page is a template, which reads the properties.

    Args:
        name: Title.
        baseline: The strategy with which the others are compared.
        runs: The runs.
        summary: The rows of `kerple.compare.statistics.summarise` that are shown.
        missing: Names of unfinished runs.
        deviations: Differences from the comparison's plan.
    """

    name: str
    baseline: str
    runs: Runs
    summary: pd.DataFrame
    missing: Sequence[str]
    deviations: Sequence[str]

    @cached_property
    def charts(self) -> list[Chart]:
        """The charts, in the order of the page."""
        return list(charts(self.summary, self.runs, self.baseline))

    @cached_property
    def tables(self) -> tuple[list[Table], list[Table]]:
        """The tables of the section Results, and those of the section Details."""
        main: list[Table | None] = []
        details: list[Table | None] = []
        blocks, strategies, lengths = self.runs.blocks, self.summary["strategy"], self.runs.training_lengths
        for metric, of_metric in self.summary.groupby("metric", sort=False):
            main.append(tables.task_table(self.runs.results, str(metric), lengths))
            for protocol, cells in of_metric.groupby("protocol", sort=False):
                trained = lengths[str(protocol)]
                # bits per byte are in Details, because with one tokenizer they rank the strategies like perplexity
                section = details if metric == "bits_per_byte" else main
                if metric == "ppl" and "far_own" not in str(protocol):  # the tables of far_own are added below
                    main += tables.difference_tables(blocks, strategies, str(protocol), trained)
                section.append(tables.metric_table(cells, trained, self.baseline))
                details.append(tables.ratio_table(cells, trained, self.baseline))
        for own in (protocol for protocol in lengths if "far_own" in protocol):
            main += tables.difference_tables(blocks, strategies, own, lengths[own])
        main += stage_tables(self.runs)
        main.append(tables.cost_table(self.runs.costs))
        details += analyses({name: of for name, of in self.runs.analyses.items() if name not in DRAWN_ANALYSES})
        return [table for table in main if table], [table for table in details if table]

    @property
    def seeds(self) -> str:
        """The seeds, and how many of them a strategy has in a part: "× seeds 1, 2" if each has all of them."""
        seeds = sorted({run.seed for run in self.runs.configs})
        numbers = Counter((run.part, run.strategy) for run in self.runs.configs).values()
        listed = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
        fewest, most = min(numbers), max(numbers)
        if fewest == len(seeds):
            return f"× {listed}"
        return f"with {fewest if fewest == most else f'{fewest} to {most}'} of the {listed}"

    def findings(self) -> Iterator[str]:
        """Sentences on the main results, and on the number of seeds that an effect needs."""
        yield from findings(self.summary, self.runs, self.baseline)
        yield from power_of_the_tests(self.summary, self.runs, self.baseline)

    def protocols(self) -> Iterator[tuple[str, str, str, str]]:
        """Rows (protocol, meaning, lengths, number of targets per run) of all protocols."""
        for protocol, group in self.runs.results.groupby("protocol", sort=False):
            name = str(protocol).split()[-1]
            meaning = next((text for start, text in PROTOCOLS.items() if name.startswith(start)), "task")
            # the counts of bits per byte are numbers of bytes
            targets = tables.format_range(group.loc[group["metric"] != "bits_per_byte", "count"])
            lengths = sorted(int(length) for length in group["length"].unique())
            many = f"{lengths[0]}–{lengths[-1]} ({len(lengths)} lengths)"
            shown = ", ".join(map(str, lengths)) if len(lengths) <= 16 else many
            meaning = ". ".join([meaning, *self.runs.text_descriptions.get(str(protocol), [])])
            yield str(protocol), meaning, shown, targets

    def environments(self) -> Iterator[tuple[str, str]]:
        """Rows (entry, value) of versions and machine. If runs differ in an entry, all its values are listed."""
        environments = self.runs.environments.values()
        for key in dict.fromkeys(key for environment in environments for key in environment):
            yield key, " | ".join(dict.fromkeys(str(e[key]) for e in environments if key in e))

    @cached_property
    def configs(self) -> tuple[str, dict[str, dict[str, str]]]:
        """The options that are equal in all runs, as YAML, and the other options of each part and strategy."""
        configs = public_configs(self.runs)
        first, *others = configs.values()
        common = {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
        differing: dict[str, dict[str, str]] = {}
        for run, config in configs.items():  # the first seed stands for all seeds of a strategy
            own = {key: str(value) for key, value in config.items() if key not in common}
            differing.setdefault(run.part_and_strategy, own)
        return yaml.safe_dump(common, sort_keys=False), differing

    def data(self) -> Markup:
        """JSON of the charts, for the script of the page. In a panel, a strategy has rows (x, y, low, high, text)."""

        def rows(points: pd.DataFrame) -> Any:
            # pandas writes infinite and missing values as null, because JSON has neither
            return json.loads(points[["x", "y", "low", "high", "text"]].to_json(orient="values", double_precision=8))

        def panel(of: Panel) -> dict[str, Any]:
            return vars(of) | {"points": {str(name): rows(p) for name, p in of.points.groupby("strategy", sort=False)}}

        shown = [vars(chart) | {"panels": list(map(panel, chart.panels))} for chart in self.charts]
        data = {"styles": styles_of(self.summary["strategy"]), "charts": shown}
        return Markup(json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"))

    @cached_property
    def scripts(self) -> tuple[str, Markup]:
        """The script of Plotly, as gzip in base64, which is 40% of its size, and that of the page."""
        plotly, page = (
            resources.files(package).joinpath(file).read_bytes()
            for package, file in (("plotly", "package_data/plotly.min.js"), ("kerple.compare", "page.js"))
        )
        return base64.b64encode(gzip.compress(plotly, 6, mtime=0)).decode(), Markup(page.decode())
