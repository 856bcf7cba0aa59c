"""Reading of the files of a run directory, for reports.

A run directory holds ``config.yaml`` (the resolved configuration), ``cost.json`` (speed, memory, versions, machine)
and, after a test, ``test/`` with JSON files of result rows and the CSV files of analyses. A result row of a perplexity
is ``{protocol, length, nll_sum, targets}``; any other, such as a task's accuracy, is ``{metric, protocol, length,
value}``.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from kerple.base.errors import UserError
from kerple.evaluation.results import OWN_TABLES

TOO_LARGE = ("attention_maps",)  # files with a row for each query and key are left out
# entries about a test, in the file of its rows
ABOUT = ("split", "block", "sampling", "documents", "precision", "block_document")
SETTING = {"windowed": "window", "sliding": "stride", "last": "k"}  # options that are part of a protocol's name


def read_yaml(path: Path) -> dict[str, Any]:
    """A configuration that `fit` wrote; a UserError names the file that is missing or none."""
    if not path.exists():
        raise UserError(f"{path.parent}: has no {path.name}, expected a directory that `fit` wrote")
    try:
        content = yaml.safe_load(path.read_text())
    except (UnicodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: is no YAML ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: got {content!r:.60}, expected the options that `fit` writes")
    return content


def read_json(path: Path) -> Any:
    """Content of a JSON file; a UserError names the file that is none."""
    try:
        return json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is no JSON ({error}); test the run again") from error


def read_csv(path: Path) -> pd.DataFrame:
    """Table of a CSV file; a UserError names the file that is none."""
    try:
        return pd.read_csv(path)
    except ValueError as error:
        raise UserError(f"{path}: is no CSV ({error}); test the run again") from error


def result_rows(content: Any) -> list[dict[str, Any]]:
    """Result rows in the content of a JSON file; none if the file is of another kind."""
    rows = content.get("rows", []) if isinstance(content, dict) else content
    about = {key: content[key] for key in ABOUT if key in content} if isinstance(content, dict) else {}
    return [about | row for row in rows if isinstance(row, dict) and {"protocol", "length"} <= row.keys()]


def text_of(row: dict[str, Any]) -> str:
    """The options of `Extrapolation` that are not part of a protocol's name, as a phrase."""
    paper, documents = row.get("sampling") == "paper", len({*row.get("block_document", ())})
    choices = [
        f"{row['split']} split" if "split" in row else "",
        f"blocks of {row['block']} targets" if "block" in row and not paper else "",
        "shuffled segments, other text at each length" if paper else "",
        f"inside {documents} document{'s' * (documents > 1)}" if documents else "",
        "inside documents only" if row.get("documents") and not documents else "",
        f"the first {row['skip']} targets of a block are context only" if row.get("skip") else "",
        f"computed in {row['precision']}" if "precision" in row else "",
    ]
    return ", ".join(filter(None, choices))


def analyses_in(folder: Path) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the name and the table of each analysis, and losses by position in 64 bins as ``by_position``."""
    for path in sorted(folder.glob("*.csv")):
        if path.stem in OWN_TABLES:
            raise UserError(f"{path}: has the name of a table of the report; give the analysis another name")
        if path.stem not in TOO_LARGE:
            yield path.stem, condensed(read_csv(path))
    bins = []
    for path in sorted(folder.glob("*.json")):
        content = read_json(path)
        for curve in content.get("by_position", []) if isinstance(content, dict) else []:
            table = pd.DataFrame({"sum": curve["nll_sum"], "count": curve["targets"]}, dtype=np.float64)
            table["sum"] = table["sum"].fillna(np.inf)  # strict JSON has null for an infinite loss
            width = max(1, curve["length"] // 64)
            table["first"] = table.index // width * width
            binned = table.groupby("first", as_index=False)[["sum", "count"]].sum()
            bins.append(binned.assign(length=curve["length"], ppl=np.exp(binned["sum"] / binned["count"])))
    if bins:
        yield "by_position", pd.concat(bins)[["length", "first", "ppl", "sum", "count"]]


def condensed(table: pd.DataFrame) -> pd.DataFrame:
    """A smaller table: sums over 64 bins of positions, and only the distances 2^(n/4)."""
    if {"position", "nll_full", "nll_windowed", "targets"} <= set(table.columns):
        width = max(1, (table["position"].max() + 1) // 64)
        losses = table[["nll_full", "nll_windowed"]].fillna(np.inf)  # a sum leaves out what is no number
        table = table.assign(first=table["position"] // width * width, **losses)
        summed = table.groupby(["first", "window"], as_index=False)[["targets", "nll_full", "nll_windowed"]].sum()
        for name in ("full", "windowed"):
            summed[f"ppl_{name}"] = np.exp(summed[f"nll_{name}"] / summed["targets"])
        return summed
    if "distance" in table and table["distance"].nunique() > 256:
        kept = {0, *np.unique(np.round(2 ** np.arange(0, 32, 0.25)).astype(np.int64)), table["distance"].max()}
        return table[table["distance"].isin(kept)]
    return table


def results_in(row: dict[str, Any], path: Path) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Yield the cells of a result row, each with its sums by block.

    Blocks of one document are summed to one, where the row names the documents: text by one author about one thing is
    not two samples of text.

    Args:
        row: A row as `result_rows` returns it.
        path: Its file, for messages.

    Yields:
        A cell with metric, protocol, length, value, sum and count, and for each block its number, sum and count; there
        are no blocks if the row has no sums by block.

    Raises:
        UserError: If the row is of neither kind, its sums do not add up, or its blocks are not all given a document.
    """
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
        return  # its sums are those of full; `analyses_in` reads the losses by position
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
    """Sums by block, or by document where the row names these; what a limited test did not read is no sample of text.

    They must add up to the total, so that an interval belongs to the number beside it.
    """
    parts, documents = row.get(sums), row.get("block_document", [])
    if not isinstance(documents, list) or {*map(type, documents)} - {int}:
        raise UserError(f"{where}: block_document: got what is no list of numbers, expected the document of each block")
    if not parts or None in parts:
        return []
    # without counts, all blocks are equally long
    numbers = row.get(counts) or [total["count"] / len(parts)] * len(parts)
    if len(numbers) != len(parts) or not math.isclose(math.fsum(parts), total["sum"], rel_tol=1e-6, abs_tol=1e-9):
        raise UserError(f"{where}: {sums} ({len(parts)} blocks) does not add up to the row's sum {total['sum']}")
    documents = documents or list(range(len(parts)))
    if len(documents) != len(parts):
        raise UserError(f"{where}: block_document: got {len(documents)} of them, expected {len(parts)}, as {sums} has")
    by_document = {document: [0, 0] for document in documents}
    for document, s, n in zip(documents, parts, numbers, strict=True):
        by_document[document][0] += s
        by_document[document][1] += n
    return [{"block": i, "sum": s, "count": n} for i, (s, n) in enumerate(by_document.values()) if n]


def results_of(directory: Path, test: str = "test") -> dict[str, Any]:
    """Everything that `kerple.compare.collect.read` uses of a run, small enough to commit.

    `unpack` makes a run directory of it again.

    Args:
        directory: The run directory.
        test: Name of the test's folder in it.
    """
    found: dict[str, Any] = {"config.yaml": read_yaml(directory / "config.yaml")}
    if (directory / "cost.json").exists():
        found["cost.json"] = read_json(directory / "cost.json")
    found["test"] = {path.name: read_json(path) for path in sorted((directory / test).glob("*.json"))}
    for path in sorted((directory / test).glob("*.csv")):
        if path.stem not in TOO_LARGE:
            found["test"][path.name] = condensed(read_csv(path)).to_csv(index=False)
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
