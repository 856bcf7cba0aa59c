"""Corpora that are tables: Parquet files and Hugging Face datasets. Their optional packages are imported on use."""

from collections.abc import Iterator
from typing import Any

from kerple.base.errors import UserError
from kerple.data.files import filesystem, is_remote, open_bytes, retry
from kerple.data.prepare.sources import Place, Record, Source


class Parquet(Source):
    """One column of a Parquet file, read one row group at a time. It needs `pyarrow`.

    Args:
        path: Path or URL of the file.
        size: Bytes of the file, or None.
        text_field: Name of the column, which holds strings.
    """

    def __init__(self, path: str, size: int | None, text_field: str) -> None:
        super().__init__(path, [path], size)
        self.text_field = text_field

    def records(self, start: Place, limit: int) -> Iterator[Record]:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise UserError(f"{self.name}: reading Parquet needs pyarrow; pip install pyarrow") from error
        with open_bytes(self.name) if not is_remote(self.name) else _seekable(self.name) as file:
            try:
                table = parquet.ParquetFile(file)
                if self.text_field not in table.schema_arrow.names:
                    raise UserError(f"has no column {self.text_field!r}, but {', '.join(table.schema_arrow.names)}")
                yield from self._rows(table, start[1], limit)
            except (pyarrow.ArrowException, OSError, ValueError) as error:
                raise UserError(f"{self.name}: {error}") from error

    def _rows(self, table: Any, skip: int, limit: int) -> Iterator[Record]:
        number = 0
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            if number + rows <= skip:
                number += rows
                continue
            for batch in table.iter_batches(batch_size=256, row_groups=[group], columns=[self.text_field]):
                for value in batch.column(0):
                    number += 1
                    if number > skip:
                        consumed = (self.size or 0) * number // max(table.metadata.num_rows, 1)
                        name = f"{self.name}:{number}"
                        try:
                            text = value.as_py()
                        except UnicodeError:
                            lost = value.as_buffer().size
                            yield Record(b"", name, (0, number), False, consumed, "not Unicode", lost)
                        else:
                            yield text_record(text, name, number, limit, consumed)


class HubDataset(Source):
    """A dataset of the Hugging Face hub, which is streamed. It needs `datasets`, and runs no loading scripts.

    Args:
        name: `NAME[:CONFIG[:SPLIT]]`. The dataset's split `train` is read unless another is named; like any corpus, it
            is divided into train, validation and test by a hash of the text.
        text_field: Name of the feature, which holds strings.
    """

    def __init__(self, name: str, text_field: str) -> None:
        super().__init__(name, [], None)
        self.text_field = text_field
        self.path, self.config, self.split = (*name.split(":"), "", "")[:3]

    def records(self, start: Place, limit: int) -> Iterator[Record]:
        try:
            import datasets
        except ImportError as error:
            raise UserError(f"corpus: hf:{self.name} needs the package datasets; pip install datasets") from error
        try:
            rows = datasets.load_dataset(self.path, self.config or None, split=self.split or "train", streaming=True)
            for number, row in enumerate(rows.skip(start[1]), start[1] + 1):
                if number == start[1] + 1 and self.text_field not in row:
                    raise UserError(f"has no column {self.text_field!r}, but {', '.join(row)}")
                yield text_record(row.get(self.text_field), f"hf:{self.name}:{number}", number, limit, 0)
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(f"corpus: hf:{self.name}: {error}") from error


def text_record(text: Any, name: str, number: int, limit: int, consumed: int) -> Record:
    """The record of row `number` with the value `text`; anything but a string of at most `limit` bytes is a fault."""
    raw, fault = b"", None
    if not isinstance(text, str):
        fault = "no text"
    else:
        raw = text.encode("utf-8", "surrogatepass")
        if len(raw) > limit:
            fault = f"more than {limit} bytes"
    return Record(b"" if fault else raw, name, (0, number), False, consumed, fault, len(raw) if fault else 0)


def _seekable(path: str) -> Any:
    """Open a remote file that can be read at any place: the index of a Parquet file is at its end."""

    def attempt() -> Any:
        system, inner = filesystem(path)
        return system.open(inner, "rb")

    return retry(attempt, path)
