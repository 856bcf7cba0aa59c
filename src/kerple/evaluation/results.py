"""The rows of a test's results, and the files that hold them."""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

OWN_TABLES = ("results", "summary", "costs")  # tables of a report, whose names no analysis can have
VERSION = 2  # of the file; in version 1, bytes were those of an average token of the split instead of each target's
SETTING = {"windowed": "window", "sliding": "stride", "last": "k"}


@dataclass(frozen=True, slots=True)
class Row:
    """A sum that a test measured, of which a report makes a mean.

    Args:
        metric: ``ppl`` (nats of targets), ``bits_per_byte`` (bits of bytes of text), or another, such as ``accuracy``.
        protocol: Label of the protocol, such as windowed64.
        length: Evaluation length in tokens.
        position: Position in the segment; None for all.
        block: Number of the block of text; None for all.
        sum: The sum.
        count: Of how many.
    """

    metric: str
    protocol: str
    length: int
    position: int | None
    block: int | None
    sum: float
    count: int


def write(folder: Path, name: str, rows: Iterable[Row], about: dict[str, Any]) -> None:
    """Write the results of a test to ``<name>.json``.

    Args:
        folder: Folder of the test's results.
        name: Name of the file.
        rows: The sums.
        about: What else there is to say, such as the lengths that were skipped.
    """
    about = dict(about)
    skip = about.pop("skip", 0)
    cells: dict[tuple[str, int], dict[str, Any]] = {}
    curves = []
    for (metric, label, length), group in groupby(rows, key=lambda row: (row.metric, row.protocol, row.length)):
        parts = list(group)
        total, count = math.fsum(row.sum for row in parts), sum(row.count for row in parts)
        protocol, option = re.fullmatch(r"(\D+?)(\d*)", label).groups() if metric != "accuracy" else (label, "")  # type: ignore[union-attr]
        of = {"protocol": protocol, "length": length, "skip": skip if protocol == "sliding" else 0}
        of |= {key: int(option) if SETTING.get(protocol) == key else None for key in SETTING.values()}
        if metric == "ppl":
            blocks = [row for row in parts if row.block is not None]
            cells[label, length] = of | {"nll_sum": total, "targets": count, "bytes": 0, "bits_per_byte": None}
            cells[label, length] |= {"ppl": math.exp(min(total / count, 700))}
            if blocks:
                cells[label, length] |= {
                    "block_nll": [r.sum for r in blocks],
                    "block_targets": [r.count for r in blocks],
                }
            else:
                sums = {"nll_sum": [r.sum for r in parts], "targets": [r.count for r in parts]}
                curves.append({"length": length} | sums)
        elif metric == "bits_per_byte":
            cells[label, length] |= {"bytes": count, "bits_per_byte": total / count}
        else:
            cells[label, length] = of | {"metric": metric, "sum": total, "count": count, "value": total / count}
    content = {"version": VERSION} | about | {"rows": list(cells.values()), "by_position": curves}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content, allow_nan=False, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
