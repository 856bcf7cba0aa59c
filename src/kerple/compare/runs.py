"""Finished runs as tables of results, costs and analyses."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from kerple.base.errors import UserError
from kerple.base.mapping import read_mapping
from kerple.compare.configuration import configured_length, flat
from kerple.compare.statistics import CELL, LOGARITHMIC
from kerple.measure import results

RUN_KEYS = ["strategy", "seed"]
REPORT_TABLES = ("results", "summary", "costs")  # names that tables of analyses cannot have


@dataclass(frozen=True)
class Run:
    """A finished run: one strategy, trained with one seed.

    Args:
        strategy: Label of the strategy in tables and figures.
        seed: Seed of the initialisation and the order of data.
        folder: Folder of the test, inside the run's folder, or a record of it.
        part: Part of the comparison, such as a task or a corpus; empty if there is only one.
    """

    strategy: str
    seed: int
    folder: Path
    part: str = ""

    @property
    def label(self) -> str:
        """Part and strategy, as text."""
        return f"{self.part} {self.strategy}".strip()


@dataclass(frozen=True)
class Runs:
    """The results of all runs of a comparison, as tables whose first columns are strategy and seed.

    Args:
        results: Columns metric, protocol, length, value, sum and count.
        blocks: Columns metric, protocol, length, block, sum and count; empty if the runs have no sums by block. A
            block is a document if the test knows documents, or a group, such as a package, if it knows groups.
        costs: Cost of training: a row for each run with a known cost, and a column part if runs have parts.
        analyses: The tables of the analyses, by name.
        configs: The resolved configuration of each run, with dotted keys.
        environments: Versions and machine of each run.
        training_lengths: Training length of each protocol; None if its runs differ in it.
        text_descriptions: Descriptions of the scored text of each protocol; several if runs differ.
    """

    results: pd.DataFrame
    blocks: pd.DataFrame
    costs: pd.DataFrame
    analyses: dict[str, pd.DataFrame] = field(default_factory=dict)
    configs: dict[Run, dict[str, Any]] = field(default_factory=dict)
    environments: dict[Run, dict[str, Any]] = field(default_factory=dict)
    training_lengths: dict[str, int | None] = field(default_factory=dict)
    text_descriptions: dict[str, list[str]] = field(default_factory=dict)

    @property
    def training_length(self) -> int | None:
        """Training length if it is the same for all runs, else None."""
        lengths = {configured_length(config) for config in self.configs.values()}
        return lengths.pop() if len(lengths) == 1 else None


def read_runs(runs: Iterable[Run]) -> Runs:
    """Read the results of finished runs.

    Raises:
        UserError: If a run has no results, or two runs have the same label, seed and cell.
    """
    tables = {run: results.read(run.folder) for run in runs}
    names = {(run.part, protocol) for run, (table, _) in tables.items() for protocol in table["protocol"].unique()}
    number_of_parts = Counter(protocol for _, protocol in names)
    cells: list[pd.DataFrame] = []
    blocks: list[pd.DataFrame] = []
    costs: list[dict[str, Any]] = []
    analyses: dict[str, list[pd.DataFrame]] = {}
    configs: dict[Run, dict[str, Any]] = {}
    environments: dict[Run, dict[str, Any]] = {}
    lengths: dict[str, int | None] = {}
    descriptions: dict[str, list[str]] = {}
    for run, (table, about) in tables.items():
        key: dict[str, Any] = {"strategy": run.strategy, "seed": run.seed}
        part = {"part": run.part} if run.part else {}
        configs[run], cost = _configuration_and_cost(run.folder, about)
        if run.part:
            # a task's protocol is its name, with the part as a prefix only if several parts have the task
            prefixed = table["metric"].isin(LOGARITHMIC) | (table["protocol"].map(number_of_parts) > 1)
            table["protocol"] = table["protocol"].where(~prefixed, run.part + " " + table["protocol"])
        totals = results.totals(table)
        if totals.empty:
            raise UserError(
                f"{run.folder}: got no results except losses by position; add full to the protocols of Extrapolation, "
                "and test again"
            )
        length = configured_length(configs[run])
        for protocol in totals["protocol"].unique():
            lengths[protocol] = length if lengths.setdefault(protocol, length) == length else None
        for protocol, description in _text_descriptions(about):
            name = protocol if protocol in set(table["protocol"]) else f"{run.part} {protocol}"
            if description and description not in descriptions.setdefault(name, []):
                descriptions[name].append(description)
        cells.append(totals.assign(**key, folder=str(run.folder)))
        blocks.append(_sums_by_block(table, about).assign(**key))
        if cost:
            environments[run] = cost.pop("environment", {})
            costs.append(key | part | cost)
        for name, of_analysis in _analyses(run.folder):
            analyses.setdefault(name, []).append(of_analysis.assign(**key, **part))
    all_cells = pd.concat(cells, ignore_index=True)
    twice = all_cells[all_cells.duplicated([*RUN_KEYS, *CELL], keep=False)]
    if len(twice):
        folders = ", ".join(dict.fromkeys(twice["folder"]))
        raise UserError(
            f"compare: {folders}: both have results of {twice['strategy'].iloc[0]} seed {twice['seed'].iloc[0]}; "
            "expected each strategy and seed once; leave one out, or give it another label"
        )
    return Runs(
        results=all_cells[[*RUN_KEYS, *CELL, "value", "sum", "count"]],
        blocks=pd.concat(blocks, ignore_index=True)[[*RUN_KEYS, *CELL, "block", "sum", "count"]],
        costs=pd.DataFrame(costs, columns=None if costs else RUN_KEYS),
        analyses={name: _joined(of_runs) for name, of_runs in analyses.items()},
        configs=configs,
        environments=environments,
        training_lengths=lengths,
        text_descriptions=descriptions,
    )


def _sums_by_block(table: pd.DataFrame, about: dict[str, Any]) -> pd.DataFrame:
    """Sums by block of text; sums of documents of one group, such as a package, are added if the test knows groups.

    Documents of one package have the same authors. The sampling unit of text is therefore the package.
    """
    blocks = table[table["block"].notna()]
    for evaluation in about["evaluations"].values():
        if len(set(groups := evaluation.get("groups") or [])) > 1:
            described = blocks["protocol"].isin(evaluation["protocols"])
            named = blocks[described].assign(block=[groups[block] for block in blocks["block"][described]])
            added = named.groupby([*CELL, "block"], sort=False, as_index=False)[["sum", "count"]].sum()
            blocks = pd.concat([blocks[~described], added])
    return blocks


def _joined(tables: list[pd.DataFrame]) -> pd.DataFrame:
    table = pd.concat(tables, ignore_index=True)
    return table[[*RUN_KEYS, *table.columns.drop(RUN_KEYS)]]


def _configuration_and_cost(folder: Path, about: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Configuration of the training of a run, with dotted keys, and its costs.

    A test by `compare` has both in its results.json. For other tests they are files of the parent folder; if it does
    not have them, both are empty.
    """
    if "run" in about:
        return dict(about["run"]["config"]), dict(about["run"]["cost"])
    path, cost = folder.parent / "config.yaml", folder.parent / "cost.json"
    return flat(read_mapping(path)) if path.exists() else {}, read_mapping(cost) if cost.exists() else {}


def _text_descriptions(about: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each protocol of a test, and a phrase that describes the scored text."""
    for evaluation in about["evaluations"].values():
        paper, documents = evaluation.get("sampling") == "paper", evaluation.get("documents")
        counted = f"inside {documents} document{'s' * (documents != 1)}" if documents else ""
        if left_out := evaluation.get("overlapping"):
            counted += f" (of the whole split, {left_out} are left out, which the training text has too)"
        for protocol in evaluation.get("protocols", ()):
            skip = evaluation.get("skip", 0) if protocol.startswith("sliding") else 0
            choices = [
                f"{evaluation['split']} split" if "split" in evaluation else "",
                f"blocks of {evaluation['block']} targets" if "block" in evaluation and not paper else "",
                "shuffled segments, other text at each length" if paper else "",
                counted,
                f"the first {skip} targets of a block are context only" if skip else "",
                f"computed in {evaluation['precision']}" if "precision" in evaluation else "",
            ]
            yield protocol, ", ".join(filter(None, choices))


def _analyses(folder: Path) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the name and the table of each analysis of a test.

    Raises:
        UserError: If a table cannot be read, or has the name of a table of the report.
    """
    for path in sorted([*folder.glob("*.csv"), *folder.glob("*.csv.gz")]):
        if path.name != results.TABLE:
            if (name := path.name.split(".")[0]) in REPORT_TABLES:
                raise UserError(f"{path}: a table of the report has the name {name}; give the analysis another name")
            try:
                yield name, pd.read_csv(path)
            except ValueError as error:
                raise UserError(f"{path}: is not a CSV file ({error}); test the run again") from error
