"""Writing of files, whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import BinaryIO


@contextmanager
def writing(path: Path, durable: bool = True) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of ``path`` when the block ends, and goes when it raises.

    A kill at any moment leaves the previous file or the new one, never a part of one.

    Args:
        path: Of the file; its folder is made where it is missing.
        durable: Whether that holds of a power cut too: it waits for the disk, twice.

    Raises:
        OSError: It cannot be written; the previous file is intact.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for left_over in path.parent.glob(f".{escape(path.name)}.*"):  # of a process that was killed while it wrote
        left_over.unlink(missing_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with fresh.open("wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    if durable:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name is an entry of the folder
        finally:
            os.close(folder)


def write(path: Path, content: bytes | str, durable: bool = True) -> None:
    """Write a file of this content, text as UTF-8; arguments and errors as of `writing`."""
    with writing(path, durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)
