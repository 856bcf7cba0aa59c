"""Reading of finished runs into tables."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from kerple.base.errors import UserError
from kerple.compare.files import analyses_in, read_json, read_yaml, result_rows, results_in, text_of
from kerple.compare.statistics import LOGARITHMIC

RUN_KEYS = ["strategy", "seed"]
RESULT = ["metric", "protocol", "length"]
SEED_FOLDER = re.compile(r"seed-\d+(_v\d+)?")  # the name that `fit` gives, below a folder of the strategy


@dataclass(frozen=True)
class Run:
    """A run: one strategy, trained with one seed.

    Args:
        strategy: Label of the strategy in tables and figures.
        seed: Seed of the initialisation and the order of data.
        directory: The run directory.
        test: Name of the test's folder in it.
        part: Part of the comparison, such as a task or a corpus; empty if there is only one.
    """

    strategy: str
    seed: int
    directory: Path
    test: str = "test"
    part: str = ""

    @property
    def label(self) -> str:
        """Part and strategy, as text."""
        return f"{self.part} {self.strategy}".strip()


@dataclass(frozen=True)
class Runs:
    """The results of all runs of a comparison, as tables whose first columns are strategy and seed.

    Args:
        results: Columns metric, protocol, length, value, sum and count; the value is made of the latter two, which are
            NaN if unknown.
        blocks: Columns metric, protocol, length, block, sum, count; empty if the runs have no sums by block. Where the
            tests tell, a block is all that was scored of a document.
        costs: What `Throughput` measured: a row for each run that has it, with its part if it has one.
        analyses: The tables of the analyses, by the names of their CSV files.
        configs: The resolved configuration of each run.
        environments: Versions and machine of each run.
        trained: Training length of each protocol, or None if its runs differ in it.
        text: Descriptions of the text that each protocol scored; there are several if runs differ.
        old_bytes: Whether bits per byte are from old tests, which took the average token for each target.
    """

    results: pd.DataFrame
    blocks: pd.DataFrame
    costs: pd.DataFrame
    analyses: dict[str, pd.DataFrame]
    configs: dict[Run, dict[str, Any]]
    environments: dict[Run, dict[str, Any]]
    trained: dict[str, int | None]
    text: dict[str, list[str]] = field(default_factory=dict)
    old_bytes: bool = False

    @property
    def training_length(self) -> int | None:
        """Training length if it is the same for all runs, else None."""
        lengths = {training_length(config) for config in self.configs.values()}
        return lengths.pop() if len(lengths) == 1 else None


def locate(directories: Iterable[Path], test: str = "test") -> list[Run]:
    """Find the runs below some directories, and label each by the strategy in its configuration.

    Runs of one class with different options would have the same label. If a class occurs twice with one seed, its runs
    are therefore labelled by the folder above ``seed-<n>``, if they are in such folders.

    Args:
        directories: Where to look.
        test: Name of the test's folder in each run.

    Raises:
        UserError: If there are no runs, or a config.yaml is not one that `fit` wrote.
    """
    roots = list(directories)
    folders = {path.parent for root in roots for path in root.rglob("config.yaml")}
    # a test writes its configuration too, into a folder of any name inside the run's
    found = sorted(folder for folder in folders if folder.name != "test" and not folders & {*folder.parents})
    if empty := [str(root) for root in roots if not any(folder.is_relative_to(root) for folder in found)]:
        where = ", ".join(empty)
        raise UserError(f"runs: got {where}, without a config.yaml in it, expected directories that `fit` wrote")
    runs = []
    for directory in found:
        config = read_yaml(directory / "config.yaml")
        try:
            runs.append(Run(strategy(config), int(config["seed_everything"]), directory, test))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{directory / 'config.yaml'}: has no model.position and seed_everything, expected what `fit` wrote"
            ) from error
    seeds = Counter((run.strategy, run.seed) for run in runs)
    shared = {name for (name, _), times in seeds.items() if times > 1}
    return [
        replace(run, strategy=run.directory.parent.name)
        if run.strategy in shared and SEED_FOLDER.fullmatch(run.directory.name)
        else run
        for run in runs
    ]


def read(runs: Iterable[Run]) -> Runs:
    """Read the results of runs that were fitted and tested.

    Raises:
        UserError: If a run was not tested or has only losses by position, sums in a file contradict each other, two
            runs have the same label, seed and cell, or only some of the tests say which blocks are of one document. The
            message names the files.
    """
    tables: dict[str, list[dict[str, Any]]] = {"results": [], "blocks": [], "costs": []}
    analyses: dict[str, list[pd.DataFrame]] = {}
    configs, environments = {}, {}
    lengths: dict[str, set[int | None]] = {}
    text: dict[str, dict[str, None]] = {}
    origin: dict[tuple[Any, ...], Path] = {}
    old_bytes = False
    told: dict[bool, Path] = {}
    rows_of = {run: _rows(run) for run in runs}
    parts_with: dict[str, set[str]] = {}
    for run, rows in rows_of.items():
        for _, row in rows:
            parts_with.setdefault(str(row["protocol"]), set()).add(run.part)
    for run, rows in rows_of.items():
        key: dict[str, Any] = {"strategy": run.strategy, "seed": run.seed}
        part: dict[str, Any] = {"part": run.part} if run.part else {}
        configs[run] = read_yaml(run.directory / "config.yaml")
        for path, row in rows:
            old_bytes |= row.get("bits_per_byte") is not None and "bytes" not in row
            if row.get("documents"):
                told["block_document" in row] = path
            for result, of_blocks in results_in(row, path):
                # a task has a protocol of its own, which needs no part unless several have it
                if run.part and (result["metric"] in LOGARITHMIC or len(parts_with[str(row["protocol"])]) > 1):
                    result["protocol"] = f"{run.part} {result['protocol']}"
                cell = tuple(result[c] for c in RESULT)
                if (other := origin.setdefault((run.strategy, run.seed, *cell), run.directory)) != run.directory:
                    raise UserError(
                        f"runs: {other} and {run.directory}: both hold {cell[0]}, {cell[1]} at {cell[2]} of "
                        f"{run.strategy} seed {run.seed}, expected one; leave one out, or, if their strategies differ, "
                        f"move each to <name>/seed-{run.seed} with a name of its own, which is then its label"
                    )
                lengths.setdefault(result["protocol"], set()).add(training_length(configs[run]))
                if described := text_of(row):
                    text.setdefault(result["protocol"], {})[described] = None
                tables["results"].append(key | result)
                tables["blocks"] += [key | {c: result[c] for c in RESULT} | block for block in of_blocks]
        if (cost := run.directory / "cost.json").exists():
            measured = read_json(cost)
            environments[run] = measured.pop("environment", {})
            tables["costs"].append(key | part | measured)
        for name, table in analyses_in(run.directory / run.test):
            analyses.setdefault(name, []).append(table.assign(**key, **part))
    if len(told) > 1:
        raise UserError(
            f"runs: {told[False]} does not say which blocks are of one document, {told[True]} does, expected all or "
            "none of them to, because intervals take documents as samples of text; test the older runs again"
        )
    results = pd.DataFrame(tables["results"], columns=[*RUN_KEYS, *RESULT, "value", "sum", "count"])
    blocks = pd.DataFrame(tables["blocks"], columns=[*RUN_KEYS, *RESULT, "block", "sum", "count"])
    costs = pd.DataFrame(tables["costs"], columns=None if tables["costs"] else RUN_KEYS)
    joined = {name: pd.concat(parts, ignore_index=True) for name, parts in analyses.items()}
    front = {name: table[[*RUN_KEYS, *table.columns.drop(RUN_KEYS)]] for name, table in joined.items()}
    trained = {protocol: next(iter(found)) if len(found) == 1 else None for protocol, found in lengths.items()}
    found = {protocol: list(described) for protocol, described in text.items()}
    return Runs(results, blocks, costs, front, configs, environments, trained, found, old_bytes)


def _rows(run: Run) -> list[tuple[Path, dict[str, Any]]]:
    """The result rows of a run, each with its file."""
    files = sorted((run.directory / run.test).glob("*.json"))
    rows = [(path, row) for path in files for row in result_rows(read_json(path))]
    if all(row["protocol"] == "per_position" for _, row in rows):
        raise UserError(
            f"{run.directory}: got no result rows, losses by position aside, in {run.directory / run.test}/*.json, "
            "expected those of a test; test the run first, or name the folder of its test with --test_folder"
        )
    return rows


def strategy(config: dict[str, Any]) -> str:
    """Class name of the strategy in a resolved configuration, or the name of a pretrained model and its scaling."""
    model = config["model"]
    if "path" in model:
        return " ".join(filter(None, [model_name(model["path"]), model["scaling"]]))
    position = model["position"]
    return str(position["class_path"] if isinstance(position, dict) else position).rsplit(".", 1)[-1]


def model_name(path: str) -> str:
    """Name of a pretrained model: the last part of its path or of its name on the hub, which may have points."""
    return Path(path).name.removesuffix(".gguf")


def training_length(config: dict[str, Any]) -> int | None:
    """Training length in a resolved configuration, or None if its data has no such option."""
    data = config.get("data") or {}
    settings = data.get("init_args", data)
    return settings.get("train_length", settings.get("length"))  # of a task, the length of problems, not tokens
