"""Finished runs, read into tables."""

import atexit
import json
import re
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import pandas as pd

from kerple.base.errors import UserError
from kerple.base.mapping import read_mapping
from kerple.compare.statistics import CELL, LOGARITHMIC
from kerple.hf.source import model_name
from kerple.measure import results

PACKED = "records.zip"  # beside a report: the records of its runs
RUN_KEYS = ["strategy", "seed"]
REPORT_TABLES = ("results", "summary", "costs")  # that the report writes beside those of the analyses
SEED_FOLDER = re.compile(r"seed-(\d+)(?:_v\d+)?")  # the name that `fit` gives, below a folder of the strategy

# options of where and how data is read, in place of which the checksums of the data are compared, of where and how
# often a run writes, and of what it may read
LOCATIONS = re.compile(
    r"trust|data\.(init_args\.)?(corpus|directory|workers|prepare_workers|prepare_engine|cache)"
    r"|trainer\.(default_root_dir|log_every_n_steps)|.*(save_dir|dirpath)"
)


@dataclass(frozen=True)
class Run:
    """A finished run: one strategy, trained with one seed.

    Args:
        strategy: Label of the strategy in tables and figures.
        seed: Seed of the initialisation and the order of data.
        folder: Folder of its test, inside of the run's folder, or a committed copy of it.
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
        blocks: Columns metric, protocol, length, block, sum, count; empty if the runs have no sums by block. A block
            is a document, where the test kept to documents, or a group such as a package, where it knows these.
        costs: What training cost: a row for each run of which it is known, with its part if it has one.
        analyses: The tables of the analyses, by name.
        configs: The resolved configuration of each run, with dotted keys.
        environments: Versions and machine of each run.
        trained: Training length of each protocol, or None if its runs differ in it.
        text: Descriptions of the text that each protocol scored; there are several if runs differ.
    """

    results: pd.DataFrame
    blocks: pd.DataFrame
    costs: pd.DataFrame
    analyses: dict[str, pd.DataFrame] = field(default_factory=dict)
    configs: dict[Run, dict[str, Any]] = field(default_factory=dict)
    environments: dict[Run, dict[str, Any]] = field(default_factory=dict)
    trained: dict[str, int | None] = field(default_factory=dict)
    text: dict[str, list[str]] = field(default_factory=dict)

    @property
    def training_length(self) -> int | None:
        """Training length if it is the same for all runs, else None."""
        lengths = {training_length(config) for config in self.configs.values()}
        return lengths.pop() if len(lengths) == 1 else None


def record_folders(report: Path) -> list[Path]:
    """The folders with a report's records, in ``[PART/]LABEL/seed-N``: single runs, then those of its archive if any.

    Raises:
        UserError: If the archive is damaged.
    """
    archive = report / PACKED
    packed = [_unpacked(archive, archive.read_bytes())] if archive.is_file() else []
    return [report / "runs", *packed]


@cache
def _unpacked(path: Path, content: bytes) -> Path:
    """A temporary folder with the files of an archive; zipfile writes none outside of it, whatever their names are."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        ZipFile(BytesIO(content)).extractall(folder)
    except (BadZipFile, zlib.error, EOFError) as error:
        raise UserError(f"{path}: damaged ({error}); restore it, or delete it and run again") from error
    return folder


def recorded_runs(report: Path) -> list[Run]:
    """The runs whose records are kept beside a report; a single run is newer than the archive's."""
    folders = record_folders(report)[::-1]
    found = {path.relative_to(folder): path.parent for folder in folders for path in folder.rglob(results.ABOUT)}
    runs = []
    for (*part, label, seed, _), folder in ((about.parts, found[about]) for about in sorted(found)):
        runs.append(Run(label, int(seed.removeprefix("seed-")), folder, "/".join(part)))
    return runs


def locate(directories: Iterable[Path], test: str = "test") -> list[Run]:
    """Find the runs below some directories, and label each by the strategy in its configuration.

    Runs of one class with different options would have the same label. If a class occurs twice with one seed, its runs
    are therefore labelled by the folder above ``seed-<n>``, if they are in such folders. So are runs of which only the
    test is there, with seed n; outside of such a folder by their own, with seed 0.

    Args:
        directories: Where to look.
        test: Name of the test's folder in each run.

    Raises:
        UserError: If a directory has no run, or a run's configuration has no strategy or seed.
    """
    runs = []
    for directory in directories:
        folders = sorted({path.parent for path in directory.rglob(f"{test}/{results.ABOUT}")})
        if not folders:
            raise UserError(f"runs: got {directory}, expected a directory with runs that have {test}/{results.ABOUT}")
        for folder in folders:
            run = folder.parent.resolve()
            config, _ = _trained(folder, {} if (run / "config.yaml").exists() else read_mapping(folder / results.ABOUT))
            seed = SEED_FOLDER.fullmatch(run.name)
            label, number = (run.parent.name, seed[1]) if seed else (run.name, 0)
            try:
                label, number = (strategy(config), config["seed_everything"]) if config else (label, number)
                runs.append(Run(label, int(number), folder))
            except (KeyError, TypeError, ValueError) as error:
                raise UserError(f"{folder.parent}/config.yaml: has no model.position and seed_everything") from error
    runs = list(dict.fromkeys(runs))
    seeds = Counter((run.strategy, run.seed) for run in runs)
    shared = {name for (name, _), times in seeds.items() if times > 1}
    return [
        replace(run, strategy=run.folder.parents[1].name)
        if run.strategy in shared and SEED_FOLDER.fullmatch(run.folder.parent.name)
        else run
        for run in runs
    ]


def read_runs(runs: Iterable[Run]) -> Runs:
    """Read the results of runs that were fitted and tested.

    Raises:
        UserError: If a run has no results, or two runs have the same label, seed and cell. The message names them.
    """
    tables = {run: results.read(run.folder) for run in runs}
    parts_of: dict[str, set[str]] = {}  # by protocol
    for run, (table, _) in tables.items():
        for protocol in table["protocol"].unique():
            parts_of.setdefault(protocol, set()).add(run.part)
    together, costs = Runs(pd.DataFrame(), pd.DataFrame(), pd.DataFrame()), []
    cells: list[pd.DataFrame] = []
    blocks: list[pd.DataFrame] = []
    analyses: dict[str, list[pd.DataFrame]] = {}
    lengths: dict[str, set[int | None]] = {}
    for run, (table, about) in tables.items():
        key: dict[str, Any] = {"strategy": run.strategy, "seed": run.seed}
        part: dict[str, Any] = {"part": run.part} if run.part else {}
        config, cost = _trained(run.folder, about)
        together.configs[run] = config
        if run.part:
            # the protocol of a task is its name, which does not need the part before it unless several parts have it
            alone = table["protocol"].map(lambda protocol: len(parts_of[protocol]) == 1)
            prefixed = table["metric"].isin(LOGARITHMIC) | ~alone
            table["protocol"] = table["protocol"].where(~prefixed, run.part + " " + table["protocol"])
        totals = results.totals(table)
        if totals.empty:
            raise UserError(f"{run.folder}: got no results, losses by position aside; test the run first")
        for protocol in totals["protocol"].unique():
            lengths.setdefault(protocol, set()).add(training_length(config))
        for protocol, described in _described(about):
            name = protocol if protocol in set(table["protocol"]) else f"{run.part} {protocol}"
            if described and described not in together.text.setdefault(name, []):
                together.text[name].append(described)
        cells.append(totals.assign(**key, folder=str(run.folder)))
        blocks.append(_of_text(table, about).assign(**key))
        if cost:
            together.environments[run] = cost.pop("environment", {})
            costs.append(key | part | cost)
        for name, of_analysis in _analyses(run.folder):
            analyses.setdefault(name, []).append(of_analysis.assign(**key, **part))
    all_cells = pd.concat(cells, ignore_index=True)
    twice = all_cells[all_cells.duplicated([*RUN_KEYS, *CELL], keep=False)]
    if len(twice):
        names = ", ".join(dict.fromkeys(twice["folder"]))
        raise UserError(
            f"runs: {names}: hold the same results of {twice['strategy'].iloc[0]} seed {twice['seed'].iloc[0]}, "
            "expected one; leave one out, or, if their strategies differ, move each to <name>/seed-<n> with a name of "
            "its own, which is then its label"
        )
    together.analyses.update({name: _joined(of_runs) for name, of_runs in analyses.items()})
    together.trained.update({protocol: next(iter(of)) if len(of) == 1 else None for protocol, of in lengths.items()})
    return replace(
        together,
        results=all_cells[[*RUN_KEYS, *CELL, "value", "sum", "count"]],
        blocks=pd.concat(blocks, ignore_index=True)[[*RUN_KEYS, *CELL, "block", "sum", "count"]],
        costs=pd.DataFrame(costs, columns=None if costs else RUN_KEYS),
    )


def _of_text(table: pd.DataFrame, about: dict[str, Any]) -> pd.DataFrame:
    """The sums by block of text, added up over the documents of a group, such as a package, where a test knows groups.

    Documents of one package are by the same authors, so that packages, not documents, are the sample of text.
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


def _trained(folder: Path, about: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """How a run was trained: its configuration, with dotted keys, and its costs.

    A test that `compare` ran has both in its description. Any other test has them in files of the folder above its own,
    unless it was copied without them.
    """
    if "run" in about:
        return dict(about["run"]["config"]), dict(about["run"]["cost"])
    path, cost = folder.parent / "config.yaml", folder.parent / "cost.json"
    return flat(read_mapping(path)) if path.exists() else {}, read_mapping(cost) if cost.exists() else {}


def _described(about: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each protocol of a test, and the text that it scored as a phrase."""
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
    """Yield the name and the table of each analysis that a test wrote.

    Raises:
        UserError: If a table cannot be read, or has the name of a table that the report itself writes.
    """
    for path in sorted([*folder.glob("*.csv"), *folder.glob("*.csv.gz")]):
        if path.name != results.TABLE:
            if (name := path.name.split(".")[0]) in REPORT_TABLES:
                raise UserError(f"{path}: has the name of a table of the report; give the analysis another name")
            try:
                yield name, pd.read_csv(path)
            except ValueError as error:
                raise UserError(f"{path}: is no CSV ({error}); test the run again") from error


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """Flatten a nested configuration to one level of dotted keys.

    Objects in a list, such as callbacks, have their class names as keys. Values are as JSON reads them back.
    """
    flattened: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            named = {str(item.get("class_path", i)).rsplit(".", 1)[-1]: item for i, item in enumerate(value)}
            value = named if len(named) == len(value) else value
        if isinstance(value, dict) and value:
            flattened |= {f"{key}.{inner}": leaf for inner, leaf in flat(value).items()}
        else:
            flattened[key] = value
    return json.loads(json.dumps(flattened))


def strategy(config: dict[str, Any]) -> str:
    """Class name of the strategy in a configuration, or the name of a pretrained model and what replaces its own."""
    position = config.get("model.position.class_path") or config.get("model.position")
    name = position and str(position).rsplit(".", 1)[-1]
    if "model.path" in config:
        return " ".join(filter(None, [model_name(config["model.path"]), config.get("model.scaling"), name]))
    return name or config["model.position"]


def training_length(config: dict[str, Any]) -> int | None:
    """Training length in a configuration, or None if its data has no such option."""
    keys = ("data.init_args.train_length", "data.train_length", "data.init_args.length", "data.length")
    return next((config[key] for key in keys if config.get(key) is not None), None)
