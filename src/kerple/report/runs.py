"""Finished runs, read into tables: the only place that knows what a run directory looks like.

A run directory holds ``config.yaml`` (resolved), ``cost.json`` (speed, memory, versions, machine) and, after its test,
``test/``: JSON files of result rows and, from analyses, CSV files. A result row is either ``{protocol, length,
nll_sum, targets}`` (a perplexity: the extrapolation test) or ``{metric, protocol, length, value}`` (anything else: a
task's accuracy).
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
TOO_LARGE = ("attention_maps",)  # a row for each query and key
ABOUT = ("split", "block", "sampling", "documents", "precision")  # of a test, in the file beside its rows
SEED_FOLDER = re.compile(r"seed-\d+(_v\d+)?")  # as `fit` names it: below the strategy's
SETTING = {"windowed": "window", "sliding": "stride", "last": "k"}  # part of the protocol's name, as in the logs


@dataclass(frozen=True)
class Run:
    """Where one strategy trained with one seed is found.

    Args:
        strategy: Its label in tables and figures.
        seed: Of initialisation and order of data.
        directory: The run directory.
        test: Folder of the test in it.
        part: Of a comparison over several tasks or corpora; empty if there is only one.
    """

    strategy: str
    seed: int
    directory: Path
    test: str = "test"
    part: str = ""


@dataclass(frozen=True)
class Runs:
    """What the runs of a comparison wrote, in tables whose first columns are strategy and seed.

    Args:
        results: metric, protocol, length, value, and the ``sum`` and ``count`` it is made of (NaN where unknown).
        blocks: metric, protocol, length, block, sum, count; empty if the runs kept no sums by block.
        costs: What `Throughput` measured; one row for each run that has it, with its part if it has one.
        analyses: The CSV files of the tests, one table for each name.
        configs: Resolved configuration of each run.
        environments: Versions and machine each run recorded.
        trained: Training length behind each protocol, None where its runs differ: tasks have each their own.
        text: What each protocol was measured on and how it was chosen; more than one entry where runs differ.
        old_bytes: Whether bits per byte are of tests that took the split's average token for each target.
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
    """Runs below these directories, labelled by the strategy and the seed in their configuration.

    Strategies of one class with other options would have one label: where a class has a seed twice, its runs are
    labelled by the folder above ``seed-<n>``, if they lie in such folders.

    Args:
        directories: Where to look.
        test: Folder of the test in every run.

    Raises:
        UserError: If there is none, or a config.yaml is not one that `fit` wrote.
    """
    roots = list(directories)
    folders = {path.parent for root in roots for path in root.rglob("config.yaml")}
    # a test writes its configuration too, into a folder of whatever name inside the run's
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
    """Read runs that were fitted and tested.

    Raises:
        UserError: If a run was not tested, a file does not hold what its rows say, or two runs have the same results;
            names the files.
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
                if run.part and result["metric"] in LOSSES:  # a task is a protocol of its own, a corpus is not
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
    """What `read` uses of a run, small enough to keep: `unpack` makes a folder of it that reads the same.

    Args:
        directory: Of the run.
        test: Folder of the test in it.
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
    """Write what `results_of` returned as the folder of a run, without its checkpoints."""
    (directory / test).mkdir(parents=True)
    (directory / "config.yaml").write_text(yaml.safe_dump(kept["config.yaml"], sort_keys=False))
    if "cost.json" in kept:
        (directory / "cost.json").write_text(json.dumps(kept["cost.json"], indent=1) + "\n")
    for name, content in kept["test"].items():
        path = directory / test / Path(name).name
        path.write_text(content if isinstance(content, str) else json.dumps(content) + "\n")


def strategy(config: dict[str, Any]) -> str:
    """Class name of the strategy in a resolved configuration, or what a pretrained model is called."""
    model = config["model"]
    if "path" in model:
        return " ".join(filter(None, [Path(model["path"]).stem, model["scaling"]]))
    position = model["position"]
    return str(position["class_path"] if isinstance(position, dict) else position).rsplit(".", 1)[-1]


def training_length(config: dict[str, Any]) -> int | None:
    """Training length in a resolved configuration, None if its data has no such setting."""
    data = config.get("data") or {}
    settings = data.get("init_args", data)
    return settings.get("train_length", settings.get("length"))  # tasks count what they are asked, not tokens


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
    """Result rows of a JSON file, none if it is some other analysis's."""
    content = _json(path)
    rows = content.get("rows", []) if isinstance(content, dict) else content
    about = {key: content[key] for key in ABOUT if key in content} if isinstance(content, dict) else {}
    return [about | row for row in rows if isinstance(row, dict) and {"protocol", "length"} <= row.keys()]


def _text(row: dict[str, Any]) -> str:
    """The choices of `Extrapolation` that are in no protocol's name."""
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
    """CSV files as they are, and sums of loss by position in bins, 64 to a length: enough for a figure of any
    length."""
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
    """Sums over 64 bins of positions; distances that are 2^(n/4): neither loses what claims rest on."""
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
        return  # the sums of full once more; what it adds is by position, see `_by_position`
    # a null is what strict JSON has for an infinite loss
    sums = {"sum": math.inf if row["nll_sum"] is None else float(row["nll_sum"]), "count": int(row["targets"])}
    cell = {"protocol": protocol, "length": length}
    if sums["count"] < 1:
        raise UserError(f"{where}: got {sums['count']} targets, expected at least one")
    nats = sums["sum"] / sums["count"]
    blocks = _blocks(row, "block_nll", "block_targets", sums, where)
    # np.exp: a collapsed model's perplexity is infinite, not an error
    yield {"metric": "ppl", **cell, "value": float(np.exp(nats)), **sums}, blocks
    if row.get("bits_per_byte") is not None:
        of = sums | {"count": row["bytes"]} if "bytes" in row else sums
        yield {"metric": "bits_per_byte", **cell, "value": float(row["bits_per_byte"]), **of}, []


def _blocks(row: dict[str, Any], sums: str, counts: str, total: dict[str, float], where: str) -> list[dict[str, Any]]:
    """Sums by block, checked against the total: an interval must be about the very number it stands beside."""
    parts = row.get(sums)
    if parts is None or None in parts:
        return []
    # blocks of one test are equally long; a writer whose blocks are not says how long each is
    numbers = row.get(counts) or [total["count"] / len(parts)] * len(parts)
    if len(numbers) != len(parts) or not math.isclose(math.fsum(parts), total["sum"], rel_tol=1e-6, abs_tol=1e-9):
        raise UserError(f"{where}: {sums} ({len(parts)} blocks) does not add up to the row's sum {total['sum']}")
    return [{"block": i, "sum": s, "count": n} for i, (s, n) in enumerate(zip(parts, numbers, strict=True))]
