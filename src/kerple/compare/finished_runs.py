"""Finished runs as tables of results, costs and analyses."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from kerple.base.errors import UserError, require
from kerple.compare.statistics import CELL, LOGARITHMIC
from kerple.compare.training_curves import TABLE, training_curves
from kerple.config.files import read_mapping
from kerple.config.flat_configuration import configured_length, flat
from kerple.measure import results_table

RUN_KEYS = ["strategy", "seed"]
COSTS = ("tokens_per_second", "compilation_seconds", "peak_memory_bytes", "parameters", "position_parameters", "steps")
REPORT_TABLES = ("results", "summary", "costs")  # CSV files of a report, whose names an analysis cannot have


@dataclass(frozen=True)
class FinishedRun:
    """A finished run: one strategy, trained with one seed.

    Args:
        strategy: Label of the strategy in tables and figures.
        seed: Seed of the initialisation and of the order of data.
        folder: Folder of the test, or a record, which is a committed copy of the test's files.
        part: Part of the comparison, such as a task or a corpus; empty if there is only one.
    """

    strategy: str
    seed: int
    folder: Path
    part: str = ""

    @property
    def part_and_strategy(self) -> str:
        """Part and strategy, as text."""
        return f"{self.part} {self.strategy}".strip()


@dataclass(frozen=True)
class Runs:
    """The results of all runs of a comparison, as tables whose first columns are strategy and seed.

    A protocol is a way of scoring a text, or a task. If runs have parts, a protocol's name begins with the part and a
    space, except for a task that only one part has.

    Args:
        results: Columns metric, protocol, length, value, sum and count.
        blocks: Columns metric, protocol, length, block, sum and count. Empty if the runs have no sums by block. A block
            is a group of documents (such as a package) if the test has groups, else a document if the test has
            documents, else a sequence of a fixed number of tokens. In the test of a task, a block is one problem.
        costs: Cost of training: a row for each run with a known cost, and a column part if runs have parts.
        analyses: The tables of the analyses by name, with a column part if runs have parts.
        configs: The resolved configuration of each run, with dotted keys.
        environments: Versions and machine of each run with a known cost.
        training_lengths: Training length of the runs with each protocol; None if it is not the same for all of them.
        text_descriptions: Descriptions of the scored text of each protocol; one if it is the same for all runs.
        text_digests: The beginning of the sha256 of the test text's tokens for each protocol and run. Results of old
            versions and of tasks have none.
    """

    results: pd.DataFrame
    blocks: pd.DataFrame
    costs: pd.DataFrame
    analyses: dict[str, pd.DataFrame] = field(default_factory=dict)
    configs: dict[FinishedRun, dict[str, Any]] = field(default_factory=dict)
    environments: dict[FinishedRun, dict[str, Any]] = field(default_factory=dict)
    training_lengths: dict[str, int | None] = field(default_factory=dict)
    text_descriptions: dict[str, list[str]] = field(default_factory=dict)
    text_digests: dict[str, dict[FinishedRun, str]] = field(default_factory=dict)

    @property
    def training_length(self) -> int | None:
        """The training length if it is the same for all runs, else None."""
        lengths = {configured_length(config) for config in self.configs.values()}
        return lengths.pop() if len(lengths) == 1 else None


def read_runs(runs: Iterable[FinishedRun]) -> Runs:
    """Read the results of finished runs.

    Raises:
        UserError: If a file is missing or damaged, a run has no results, or two runs have the same strategy and seed,
            and results for the same metric, protocol and length.
    """
    contents = [_read(run) for run in dict.fromkeys(runs)]
    _add_parts(contents)
    totals = pd.concat([content.totals for content in contents], ignore_index=True)
    _check_each_once(totals)
    blocks = pd.concat([_sums_by_block(content) for content in contents], ignore_index=True)
    costs = [content.key | content.cost for content in contents if content.cost]
    analyses: defaultdict[str, list[pd.DataFrame]] = defaultdict(list)
    lengths: defaultdict[str, set[int | None]] = defaultdict(set)
    descriptions: defaultdict[str, dict[str, None]] = defaultdict(dict)  # the inner dicts are ordered sets
    digests: defaultdict[str, dict[FinishedRun, str]] = defaultdict(dict)
    for content in contents:
        for name, table in _analyses(content.run.folder):
            analyses[name].append(table.assign(**content.key))
        for protocol in content.totals["protocol"].unique():
            lengths[protocol].add(configured_length(content.config))
        for protocol, description, digest in _texts(content):
            if description:
                descriptions[protocol][description] = None
            if digest:
                digests[protocol][content.run] = digest[:12]
    return Runs(
        results=totals[[*RUN_KEYS, *CELL, "value", "sum", "count"]],
        blocks=blocks[[*RUN_KEYS, *CELL, "block", "sum", "count"]],
        costs=pd.DataFrame(costs, columns=None if costs else RUN_KEYS),
        analyses={name: pd.concat(of_runs).set_index(RUN_KEYS).reset_index() for name, of_runs in analyses.items()},
        configs={content.run: content.config for content in contents},
        environments={content.run: content.environment for content in contents if content.cost},
        training_lengths={name: of_runs.pop() if len(of_runs) == 1 else None for name, of_runs in lengths.items()},
        text_descriptions={name: list(of_runs) for name, of_runs in descriptions.items()},
        text_digests=dict(digests),
    )


@dataclass
class _Content:
    """The files of a finished run.

    Args:
        run: The run.
        table: Table of its test. `_add_parts` adds the part to protocols.
        about: Description of its test.
        config: Configuration of its fit, with dotted keys.
        cost: Cost of its fit; empty if it is not known.
        environment: Versions and machine of its fit.
    """

    run: FinishedRun
    table: pd.DataFrame
    about: dict[str, Any]
    config: dict[str, Any]
    cost: dict[str, Any]
    environment: dict[str, Any]

    @property
    def key(self) -> dict[str, Any]:
        """The columns that name the run in a table. Without a part, there is no column part."""
        part = {"part": self.run.part} if self.run.part else {}
        return {"strategy": self.run.strategy, "seed": self.run.seed} | part

    @cached_property
    def totals(self) -> pd.DataFrame:
        """The results over all blocks.

        Raises:
            UserError: If the run has none.
        """
        totals = results_table.totals(self.table).assign(**self.key, folder=str(self.run.folder))
        advice = "results; add `full` to the option protocols of the callback Extrapolation, and test again"
        require(not totals.empty, str(self.run.folder), "no results except losses by position", advice)
        return totals


def _read(run: FinishedRun) -> _Content:
    table, about = results_table.read(run.folder)
    config, cost = _configuration_and_cost(run.folder, about)
    data = about.get("run", {}).get("data")
    environment = cost.pop("environment", {}) | ({"data": data[:12]} if data else {})
    return _Content(run, table, about, config, cost, environment)


def _add_parts(contents: list[_Content]) -> None:
    """Begin the protocols of runs with their part.

    The protocol of an accuracy is the name of a task. The part is added to it only if several parts have the task.
    """
    names = {(content.run.part, protocol) for content in contents for protocol in content.table["protocol"].unique()}
    number_of_parts = Counter(protocol for _, protocol in names)
    for content in contents:
        if content.run.part:
            protocol = content.table["protocol"]
            kept = ~content.table["metric"].isin(LOGARITHMIC) & (protocol.map(number_of_parts) == 1)
            content.table["protocol"] = protocol.where(kept, f"{content.run.part} " + protocol)


def _check_each_once(totals: pd.DataFrame) -> None:
    """Raise a UserError if two runs have the same strategy and seed, and a result for the same cell."""
    twice = totals[totals.duplicated([*RUN_KEYS, *CELL], keep=False)]
    if len(twice):
        folders = ", ".join(dict.fromkeys(twice["folder"]))
        repeated = f"{twice['strategy'].iloc[0]} seed {twice['seed'].iloc[0]}"
        expected = "expected each strategy and seed once; leave out a folder, or change a strategy's label"
        raise UserError(f"compare: {folders}: got results of {repeated} in each, {expected}")


def _sums_by_block(content: _Content) -> pd.DataFrame:
    """The rows of a test's table that have a block.

    If the test has groups of documents, such as packages, the sums of a group's documents are added. The block is then
    the name of the group. Documents of one package have the same authors, so the sampling unit of text is the package.
    """
    blocks = content.table[content.table["block"].notna()]
    for evaluation in content.about["evaluations"].values():
        groups = evaluation.get("groups") or []
        grouped = blocks["protocol"].str.removeprefix(f"{content.run.part} ").isin(evaluation["protocols"])
        if len(set(groups)) > 1 and grouped.any():
            named = blocks[grouped].assign(block=[groups[block] for block in blocks["block"][grouped]])
            added = named.groupby([*CELL, "block"], sort=False, as_index=False)[["sum", "count"]].sum()
            blocks = pd.concat([blocks[~grouped], added])
    return blocks.assign(**content.key)


def _configuration_and_cost(folder: Path, about: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration of a run's fit, with dotted keys, and its cost.

    The results.json of a test by `compare` contains both. For other tests they are read from config.yaml and cost.json
    in the parent folder; the configuration of a pretrained model is in the folder itself. Without these files they are
    empty.

    Raises:
        UserError: If a cost is not a number from 0.
    """
    if "run" in about:
        path, config, cost = folder / results_table.ABOUT, dict(about["run"]["config"]), dict(about["run"]["cost"])
    else:
        path, paths = folder.parent / "cost.json", (folder / "config.yaml", folder.parent / "config.yaml")
        own, config = (flat(read_mapping(file)) if file.exists() else {} for file in paths)
        # a pretrained model has no fit; the parent folder may have the configuration of an older test
        config = own if "model.path" in own else config
        cost = read_mapping(path) if path.exists() else {}
    numbers = {name: cost[name] for name in COSTS if cost.get(name) is not None}
    wrong = [name for name, value in numbers.items() if not isinstance(value, int | float) or not value >= 0]
    if not isinstance(cost.get("environment", {}), dict):
        wrong.append("environment")
    if wrong:
        given = f"got {wrong[0]}: {cost[wrong[0]]!r:.40}, expected a number from 0, or a mapping for environment"
        raise UserError(f"{path}: {given}; restore the file, or run the fit again")
    return config, cost


def _texts(content: _Content) -> Iterator[tuple[str, str, str]]:
    """Yield (protocol, description of its scored text, sha256 of the test text) for each protocol; "" if not known."""
    protocols = set(content.table["protocol"])
    for evaluation in content.about["evaluations"].values():
        is_paper = evaluation.get("sampling") == "paper"
        documents = evaluation.get("documents")
        where = f"inside {documents} document{'s' * (documents != 1)}" if documents else ""
        if left_out := evaluation.get("overlapping"):
            others = f"{left_out} other document{'s' * (left_out != 1)}"
            where += f" ({others} of the split left out because of overlap with the training text)"
        for protocol in evaluation.get("protocols", ()):
            skip = evaluation.get("skip", 0) if protocol.startswith("sliding") else 0
            # other protocols have these options in their names, or not at all; old results have neither window nor seed
            window = evaluation.get("window") if protocol.startswith("keep_first") else None
            context = evaluation.get("context") if protocol.startswith(("gap", "no_context")) else None
            near = evaluation.get("training_length") if protocol.startswith(("far_none", "far_foreign")) else None
            seed = f" (seed {evaluation['seed']})" if "seed" in evaluation else ""
            phrases = [
                f"{evaluation['split']} split" if "split" in evaluation else "",
                f"blocks of {evaluation['block']} targets" if "block" in evaluation and not is_paper else "",
                f"shuffled segments{seed}, other text at each length" if is_paper else "",
                f"window of {window} keys" if window else "",
                f"context of {context} tokens" if context else "",
                f"near text of {near} tokens" if near else "",
                where,
                f"the first {skip} targets of a block are context only" if skip else "",
                f"computed in {evaluation['precision']}" if "precision" in evaluation else "",
            ]
            name = protocol if protocol in protocols else f"{content.run.part} {protocol}"
            yield name, ", ".join(filter(None, phrases)), str(evaluation.get("text") or "")


def by_part(table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the name and the rows of each part of the comparison. Without parts, the name of all rows is empty."""
    for part, of_part in table.assign(part=table.get("part", "")).groupby("part", sort=False):
        yield str(part), of_part


def analysis_name(path: Path) -> str:
    """Name of an analysis, whose table is ``NAME.csv`` or ``NAME.csv.gz``."""
    return path.name.removesuffix(".gz").removesuffix(".csv")


def _analyses(folder: Path) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the name and the table of each analysis of a test, and the curves of the training.

    Raises:
        UserError: If a table cannot be read, or its name or that of a column is one of the report.
    """
    for path in sorted([*folder.glob("*.csv"), *folder.glob("*.csv.gz")]):
        if path.name != results_table.TABLE:
            advice = "rename it in the measure that writes it, and test the run again"
            if (name := analysis_name(path)) in REPORT_TABLES:
                raise UserError(f"{path}: the report has a table named {name} too; {advice}")
            try:
                table = pd.read_csv(path)
            except (ValueError, *results_table.DAMAGED) as error:
                raise UserError(f"{path}: is not a CSV file ({error}); test the run again") from error
            if added := [column for column in (*RUN_KEYS, "part") if column in table]:
                raise UserError(f"{path}: the report adds a column named {added[0]}; {advice}")
            yield name, table
    # `compare` has stored the curves with the test; other runs have only the events of the fit
    if not any(folder.glob(f"{TABLE}.csv*")) and (curves := training_curves(folder.parent)) is not None:
        yield TABLE, curves
