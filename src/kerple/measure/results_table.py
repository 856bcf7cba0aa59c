"""Results of `run.py test`: a table of sums and a description. Each measurement adds rows and a description."""

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd

from kerple.base.atomic import write
from kerple.base.errors import UserError

TABLE, ABOUT = "results.csv.gz", "results.json"
VERSION = 3  # of the format of these files
KEYS = ["metric", "protocol", "length", "position", "block"]  # columns that identify a row
LOSSES = ("ppl", "bits_per_byte")  # metrics whose sums are losses; all others are accuracies


@dataclass(frozen=True, slots=True)
class Row:
    """One sum of a test. The rows with the same metric, protocol and length add up to one result.

    Args:
        metric: ``ppl`` (sum of losses in nats), ``bits_per_byte`` (sum of losses in bits), or an accuracy (number of
            correct answers or tokens, or sum of recalls).
        protocol: Name of the protocol with its option, such as ``windowed64``. For a task, the name of the task.
        length: Evaluation length in tokens. For a task, the length of the problem.
        position: Position in the segment; None for a sum over positions.
        block: Number of the block, the document or the problem; None for a sum over all of them.
        sum: The sum.
        count: Number of targets, bytes, answers or answer tokens in the sum.
    """

    metric: str
    protocol: str
    length: int
    position: int | None
    block: int | None
    sum: float
    count: int


DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error)  # errors of a damaged or truncated compressed file
ROW_COLUMNS = [field.name for field in fields(Row)]


def add_to_results(folder: Path, name: str, rows: Iterable[Row], about: Mapping[str, Any]) -> None:
    """Add the rows and the description of one measurement to the results of a test. Call it in one process only.

    The description may have ``block_document``: for each block, the index of its document in the text. Blocks of one
    document are not independent samples, so their sums are added up. The column ``block`` then numbers the measured
    documents from 0, in their order in ``block_document``. The written description has ``documents`` (number of
    measured documents) and ``document_numbers`` (their indices in the text) instead of ``block_document``.

    Args:
        folder: Folder of the test.
        name: Name of the measurement. An earlier measurement of this name is replaced.
        rows: The rows. Rows with count 0 are dropped.
        about: The description, as plain data for JSON.
    """
    description = dict(about)
    table = pd.DataFrame(list(rows), columns=ROW_COLUMNS)
    table = table[table["count"] > 0]
    description["protocols"] = list(table["protocol"].unique())
    if (documents := description.pop("block_document", None)) is not None:
        order = {document: i for i, document in enumerate(dict.fromkeys(documents))}
        table["block"] = table["block"].map({block: order[document] for block, document in enumerate(documents)})
        table = table.groupby(KEYS, sort=False, dropna=False, as_index=False).sum()
        description |= {"documents": len(order), "document_numbers": list(order)}
    content: dict[str, Any] = {"version": VERSION, "evaluations": {}}
    if (folder / ABOUT).exists():
        before, content = read(folder)
        replaced = content["evaluations"].get(name, {}).get("protocols", [])
        table = pd.concat([before[~before["protocol"].isin(replaced)], table])
    content["evaluations"][name] = description
    write_table(folder, table)
    write_about(folder, content)


def write_table(folder: Path, table: pd.DataFrame) -> None:
    """Write the table of sums, with the columns of `Row`."""
    columns = {column: table[column].astype("Int64") for column in ("length", "position", "block", "count")}
    write_compressed(folder / TABLE, table.assign(**columns)[ROW_COLUMNS])


def write_compressed(path: Path, table: pd.DataFrame) -> None:
    """Write a table as compressed CSV, atomically. The file has no time stamp, so equal tables give equal bytes."""
    write(path, gzip.compress(table.to_csv(index=False, lineterminator="\n").encode(), mtime=0))


def write_about(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the description of a test."""
    write(folder / ABOUT, json.dumps(content, allow_nan=False, ensure_ascii=False, indent=1) + "\n")


def read(folder: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Return the sums of a test, with the columns of `Row`, and its description.

    Raises:
        UserError: If a file is missing, damaged or in another format. The message names the file.
    """
    path = folder / ABOUT
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        run = about.get("run", {})
        mappings = (about["evaluations"], *about["evaluations"].values(), run.get("config", {}), run.get("cost", {}))
        if about["version"] != VERSION:
            raise ValueError(f"got version {about['version']}, expected version {VERSION}")
        if not all(isinstance(mapping, dict) for mapping in mappings):
            raise ValueError("evaluations, run.config and run.cost must be mappings")
        path = folder / TABLE
        table = pd.read_csv(path, dtype={"metric": str, "protocol": str})
        if list(table.columns) != ROW_COLUMNS:
            raise ValueError(f"got the columns {list(table.columns)}, expected {ROW_COLUMNS}")
        _check_rows(table)
        table = table.astype({"position": "Int64", "block": "Int64"})
        path = folder / ABOUT
        _check_groups(table, about["evaluations"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, *DAMAGED) as error:
        reason = f"{type(error).__name__}: {error}"
        advice = "remove its folder, and run the test or the comparison again"
        raise UserError(f"{path}: cannot be read as results of a test ({reason}); {advice}") from error
    return table, about


def _check_rows(table: pd.DataFrame) -> None:
    """Raise a ValueError if a row of a test's table cannot be the result of a measurement."""
    numbers = table[["length", "count", "sum"]].apply(pd.to_numeric)
    if table[["metric", "protocol"]].isna().any(axis=None) or numbers.isna().any(axis=None):
        raise ValueError("a value is missing")
    indices = table[["position", "block"]].apply(pd.to_numeric).fillna(0)
    whole = indices.join(numbers[["length", "count"]] - 1)
    if ((whole < 0) | (whole % 1 != 0)).any(axis=None):
        raise ValueError("a length or a count is not a number from 1, or a position or a block is not one from 0")
    is_loss = table["metric"].isin(LOSSES)
    impossible = (numbers["sum"] < 0) | (~is_loss & (numbers["sum"] > numbers["count"] * (1 + 1e-9)))
    if impossible.any():
        row = table[impossible].iloc[0]
        given = f"the sum {row['sum']:g} of {row['count']} for {row['metric']}, {row['protocol']}, {row['length']}"
        raise ValueError(f"got {given}, expected 0 or more, and for an accuracy at most the count")
    if (twice := table.duplicated(KEYS)).any():
        raise ValueError(f"got a row twice: {', '.join(map(str, table[twice][KEYS].iloc[0]))}")


def _check_groups(table: pd.DataFrame, evaluations: Iterable[Mapping[str, Any]]) -> None:
    """Raise a ValueError if a block of a test with groups of documents has no group."""
    for evaluation in evaluations:
        protocols, groups = evaluation.get("protocols", []), evaluation.get("groups") or []
        if not isinstance(protocols, list) or not isinstance(groups, list):
            raise ValueError("protocols and groups must be lists")
        blocks = table["block"][table["protocol"].isin(protocols)]
        if groups and (blocks >= len(groups)).any():  # false if no row has a block
            raise ValueError(f"got {len(groups)} groups, but a row has block {blocks.max()}")


def totals(table: pd.DataFrame) -> pd.DataFrame:
    """Return the result of each metric, protocol and length: columns metric, protocol, length, sum, count, value.

    Rows by position are left out, because their total is the result of the protocol ``full``.
    """
    whole = table[table["position"].isna()]
    cells = whole.groupby(["metric", "protocol", "length"], sort=False, as_index=False)[["sum", "count"]].sum()
    return cells.assign(value=list(map(value, cells["metric"], cells["sum"], cells["count"])))


def value(metric: str, total: float, count: float) -> float:
    """Return the value of a metric: the exponential of the mean for ``ppl``, the mean for any other metric."""
    mean = total / count
    if metric != "ppl":
        return mean
    return math.exp(mean) if mean < 700 else math.inf
