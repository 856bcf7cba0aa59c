"""Reading of finished runs into tables. No other module depends on the layout of a run directory.

A run directory holds ``config.yaml`` (the resolved configuration), ``cost.json`` (speed, memory, versions, machine)
and, after a test, ``test/`` with JSON files of result rows and the CSV files of analyses. A result row of a perplexity
is ``{protocol, length, nll_sum, targets}``; any other, such as a task's accuracy, is ``{metric, protocol, length,
value}``.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from kerple.errors import UserError

RUN = ["strategy", "seed"]
RESULT = ["metric", "protocol", "length"]
LOSSES = ("ppl", "bits_per_byte")
TOO_LARGE = ("attention_maps",)  # files with a row for each query and key are left out
ABOUT = ("split", "block", "sampling", "documents", "precision")  # entries about a test, in the file of its rows
SEED_FOLDER = re.compile(r"seed-\d+(_v\d+)?")  # the name that `fit` gives, below a folder of the strategy
SETTING = {"windowed": "window", "sliding": "stride", "last": "k"}  # options that are part of a protocol's name


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


@dataclass(frozen=True)
class Runs:
    """The results of all runs of a comparison, as tables whose first columns are strategy and seed.

    Args:
        results: Columns metric, protocol, length, value, sum and count; the value is made of the latter two, which are
            NaN if unknown.
        blocks: Columns metric, protocol, length, block, sum, count; empty if the runs have no sums by block.
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
    if not found:
        where = ", ".join(map(str, roots))
        raise UserError(f"runs: no config.yaml below {where}; expected directories that `fit` wrote")
    runs = []
    for directory in found:
        config = _yaml(directory / "config.yaml")
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
        UserError: If a run was not tested, sums in a file contradict each other, or two runs have the same label, seed
            and cell. The message names the files.
    """
    tables: dict[str, list[dict[str, Any]]] = {"results": [], "blocks": [], "costs": []}
    analyses: dict[str, list[pd.DataFrame]] = {}
    configs, environments = {}, {}
    lengths: dict[str, set[int | None]] = {}
    text: dict[str, dict[str, None]] = {}
    origin: dict[tuple[Any, ...], Path] = {}
    old_bytes = False
    for run in runs:
        key = {"strategy": run.strategy, "seed": run.seed}
        part = {"part": run.part} if run.part else {}
        configs[run] = _yaml(run.directory / "config.yaml")
        rows = [(path, row) for path in sorted((run.directory / run.test).glob("*.json")) for row in _rows(path)]
        if not rows:
            raise UserError(f"{run.directory}: no result rows in {run.directory / run.test}/*.json; test the run first")
        for path, row in rows:
            old_bytes |= row.get("bits_per_byte") is not None and "bytes" not in row
            for result, blocks in _results(row, path):
                if run.part and result["metric"] in LOSSES:  # a task has a protocol of its own, a corpus has not
                    result["protocol"] = f"{run.part} {result['protocol']}"
                cell = tuple(result[c] for c in RESULT)
                if (other := origin.setdefault((run.strategy, run.seed, *cell), run.directory)) != run.directory:
                    raise UserError(
                        f"runs: {other} and {run.directory}: both hold {cell[0]}, {cell[1]} at {cell[2]} of "
                        f"{run.strategy} seed {run.seed}, expected one; leave one out, or, if their strategies differ, "
                        f"move each to <name>/seed-{run.seed} with a name of its own, which is then its label"
                    )
                lengths.setdefault(result["protocol"], set()).add(training_length(configs[run]))
                if described := _text(row):
                    text.setdefault(result["protocol"], {})[described] = None
                tables["results"].append(key | result)
                tables["blocks"] += [key | {c: result[c] for c in RESULT} | block for block in blocks]
        if (cost := run.directory / "cost.json").exists():
            measured = _json(cost)
            environments[run] = measured.pop("environment", {})
            tables["costs"].append(key | part | measured)
        for name, table in _analyses(run.directory / run.test):
            analyses.setdefault(name, []).append(table.assign(**key, **part))
    results = pd.DataFrame(tables["results"], columns=[*RUN, *RESULT, "value", "sum", "count"])
    blocks = pd.DataFrame(tables["blocks"], columns=[*RUN, *RESULT, "block", "sum", "count"])
    costs = pd.DataFrame(tables["costs"], columns=None if tables["costs"] else RUN)
    joined = {name: pd.concat(parts, ignore_index=True) for name, parts in analyses.items()}
    front = {name: table[[*RUN, *table.columns.drop(RUN)]] for name, table in joined.items()}
    trained = {protocol: next(iter(found)) if len(found) == 1 else None for protocol, found in lengths.items()}
    found = {protocol: list(described) for protocol, described in text.items()}
    return Runs(results, blocks, costs, front, configs, environments, trained, found, old_bytes)


def results_of(directory: Path, test: str = "test") -> dict[str, Any]:
    """Everything that `read` uses of a run, small enough to commit. `unpack` makes a run directory of it again.

    Args:
        directory: The run directory.
        test: Name of the test's folder in it.
    """
    found: dict[str, Any] = {"config.yaml": _yaml(directory / "config.yaml")}
    if (directory / "cost.json").exists():
        found["cost.json"] = _json(directory / "cost.json")
    found["test"] = {path.name: _json(path) for path in sorted((directory / test).glob("*.json"))}
    for path in sorted((directory / test).glob("*.csv")):
        if path.stem not in TOO_LARGE:
            found["test"][path.name] = _condensed(_csv(path)).to_csv(index=False)
    return found


def unpack(kept: dict[str, Any], directory: Path, test: str = "test") -> None:
    """Write what `results_of` returned as a run directory, without checkpoints."""
    (directory / test).mkdir(parents=True)
    (directory / "config.yaml").write_text(yaml.safe_dump(kept["config.yaml"], sort_keys=False))
    if "cost.json" in kept:
        (directory / "cost.json").write_text(json.dumps(kept["cost.json"], indent=1) + "\n")
    for name, content in kept["test"].items():
        path = directory / test / Path(name).name
        path.write_text(content if isinstance(content, str) else json.dumps(content) + "\n")


def strategy(config: dict[str, Any]) -> str:
    """Class name of the strategy in a resolved configuration, or the name of a pretrained model and its scaling."""
    model = config["model"]
    if "path" in model:
        return " ".join(filter(None, [Path(model["path"]).stem, model["scaling"]]))
    position = model["position"]
    return str(position["class_path"] if isinstance(position, dict) else position).rsplit(".", 1)[-1]


def training_length(config: dict[str, Any]) -> int | None:
    """Training length in a resolved configuration, or None if its data has no such option."""
    data = config.get("data") or {}
    settings = data.get("init_args", data)
    return settings.get("train_length", settings.get("length"))  # of a task, the length of problems, not tokens


def _yaml(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise UserError(f"{path.parent}: has no {path.name}, expected a directory that `fit` wrote")
    try:
        return yaml.safe_load(path.read_text())
    except (UnicodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: is no YAML ({error})") from error


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is no JSON ({error}); test the run again") from error


def _csv(path: Path) -> pd.DataFrame:
    try:
        return pd.read_csv(path)
    except ValueError as error:
        raise UserError(f"{path}: is no CSV ({error}); test the run again") from error


def _rows(path: Path) -> list[dict[str, Any]]:
    """Result rows of a JSON file; none if the file is of another kind."""
    content = _json(path)
    rows = content.get("rows", []) if isinstance(content, dict) else content
    about = {key: content[key] for key in ABOUT if key in content} if isinstance(content, dict) else {}
    return [about | row for row in rows if isinstance(row, dict) and {"protocol", "length"} <= row.keys()]


def _text(row: dict[str, Any]) -> str:
    """The options of `Extrapolation` that are not part of a protocol's name, as a phrase."""
    paper = row.get("sampling") == "paper"
    choices = [
        f"{row['split']} split" if "split" in row else "",
        f"blocks of {row['block']} targets" if "block" in row and not paper else "",
        "shuffled segments, other text at each length" if paper else "",
        "inside documents only" if row.get("documents") else "",
        f"the first {row['skip']} targets of a block are context only" if row.get("skip") else "",
        f"computed in {row['precision']}" if "precision" in row else "",
    ]
    return ", ".join(filter(None, choices))


def _analyses(folder: Path) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the name and the table of each analysis, and losses by position in 64 bins as ``by_position``."""
    for path in sorted(folder.glob("*.csv")):
        if path.stem not in TOO_LARGE:
            yield path.stem, _condensed(_csv(path))
    bins = []
    for path in sorted(folder.glob("*.json")):
        content = _json(path)
        for curve in content.get("by_position", []) if isinstance(content, dict) else []:
            table = pd.DataFrame({"sum": curve["nll_sum"], "count": curve["targets"]}, dtype=np.float64)
            width = max(1, curve["length"] // 64)
            table["first"] = table.index // width * width
            binned = table.groupby("first", as_index=False)[["sum", "count"]].sum()
            bins.append(binned.assign(length=curve["length"], ppl=np.exp(binned["sum"] / binned["count"])))
    if bins:
        yield "by_position", pd.concat(bins)[["length", "first", "ppl", "sum", "count"]]


def _condensed(table: pd.DataFrame) -> pd.DataFrame:
    """A smaller table: sums over 64 bins of positions, and only the distances 2^(n/4)."""
    if {"position", "nll_full", "nll_windowed", "targets"} <= set(table.columns):
        width = max(1, (table["position"].max() + 1) // 64)
        table = table.assign(first=table["position"] // width * width)
        summed = table.groupby(["first", "window"], as_index=False)[["targets", "nll_full", "nll_windowed"]].sum()
        for name in ("full", "windowed"):
            summed[f"ppl_{name}"] = np.exp(summed[f"nll_{name}"] / summed["targets"])
        return summed
    if "distance" in table and table["distance"].nunique() > 256:
        kept = {0, *np.unique(np.round(2 ** np.arange(0, 32, 0.25)).astype(np.int64)), table["distance"].max()}
        return table[table["distance"].isin(kept)]
    return table


def _results(row: dict[str, Any], path: Path) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    protocol, length = str(row["protocol"]), int(row["length"])
    if (setting := row.get(SETTING.get(protocol, ""))) is not None:
        protocol = f"{protocol}{setting}"
    where = f"{path}, {protocol} at {length}"
    if "metric" in row:
        cell = {"metric": row["metric"], "protocol": protocol, "length": length}
        sums = {"sum": row.get("sum", math.nan), "count": row.get("count", math.nan)}
        yield cell | {"value": float(row["value"])} | sums, _blocks(row, "block_sum", "block_count", sums, where)
        return
    if not {"nll_sum", "targets"} <= row.keys():
        raise UserError(f"{where}: got {', '.join(row)}, expected nll_sum and targets, or metric and value")
    if protocol == "per_position":
        return  # its sums are those of full; `_analyses` reads the losses by position
    # strict JSON has null for an infinite loss
    sums = {"sum": math.inf if row["nll_sum"] is None else float(row["nll_sum"]), "count": int(row["targets"])}
    cell = {"protocol": protocol, "length": length}
    if sums["count"] < 1:
        raise UserError(f"{where}: got {sums['count']} targets, expected at least one")
    nats = sums["sum"] / sums["count"]
    blocks = _blocks(row, "block_nll", "block_targets", sums, where)
    # np.exp returns infinity for a collapsed model, where math.exp raises
    yield {"metric": "ppl", **cell, "value": float(np.exp(nats)), **sums}, blocks
    if row.get("bits_per_byte") is not None:
        of = sums | {"count": row["bytes"]} if "bytes" in row else sums
        yield {"metric": "bits_per_byte", **cell, "value": float(row["bits_per_byte"]), **of}, []


def _blocks(row: dict[str, Any], sums: str, counts: str, total: dict[str, float], where: str) -> list[dict[str, Any]]:
    """Sums by block, which must add up to the total, so that an interval belongs to the number beside it."""
    parts = row.get(sums)
    if parts is None or None in parts:
        return []
    # without counts, all blocks are equally long
    numbers = row.get(counts) or [total["count"] / len(parts)] * len(parts)
    if len(numbers) != len(parts) or not math.isclose(math.fsum(parts), total["sum"], rel_tol=1e-6, abs_tol=1e-9):
        raise UserError(f"{where}: {sums} ({len(parts)} blocks) does not add up to the row's sum {total['sum']}")
    return [{"block": i, "sum": s, "count": n} for i, (s, n) in enumerate(zip(parts, numbers, strict=True))]
