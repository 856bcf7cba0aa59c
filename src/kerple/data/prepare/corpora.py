"""Corpora by name: a corpus is a list of sources in a fixed order."""

from pathlib import Path
from typing import Any

from kerple.base.errors import UserError
from kerple.data.files import bare, check_protocol, filesystem, is_remote, retry
from kerple.data.prepare.packages import (
    LIBRARY_MODULES,
    PACKAGES,
    STANDARD_LIBRARY,
    installed_packages,
    standard_library,
    top_modules,
)
from kerple.data.prepare.record_tables import HubDataset, Parquet
from kerple.data.prepare.sources import LINE_ENDINGS, JsonLines, Source, Tar, TextFiles

HUB = "hf:"
TAR_ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.zst")
PARQUET_ENDINGS = (".parquet",)
DATA_ENDINGS = LINE_ENDINGS + TAR_ENDINGS + PARQUET_ENDINGS


def sources(corpus: str, text_field: str = "text") -> list[Source]:
    """List the sources of a corpus in the order in which they are read.

    Args:
        corpus: `stdlib`, `modules`, `packages`, `hf:NAME[:CONFIG[:SPLIT]]` (a Hugging Face dataset, which is streamed),
            or a file, folder, glob pattern or URL. Files may be JSON lines (.jsonl, .jsonl.zst, .jsonl.gz), tar files
            of those, or Parquet. If none of the files is of these kinds, each is one document.
        text_field: Column of Parquet files and Hugging Face datasets that holds the text.

    Raises:
        UserError: The corpus has no files.
    """
    if corpus == STANDARD_LIBRARY:
        return [standard_library()]
    if corpus == LIBRARY_MODULES:
        return [top_modules()]
    if corpus == PACKAGES:
        return [installed_packages()]
    if corpus.startswith(HUB):
        return [HubDataset(corpus.removeprefix(HUB), text_field)]
    files = _files(corpus)
    if not files:
        raise UserError(
            f"data.corpus: got {corpus!r}, which holds no files; expected {STANDARD_LIBRARY!r}, {LIBRARY_MODULES!r}, "
            f"{PACKAGES!r}, a file, a folder, a URL or hf:NAME"
        )
    if not any(bare(path).endswith(DATA_ENDINGS) for path, _ in files):
        return [TextFiles(corpus, [path for path, _ in files], [size or 0 for _, size in files])]
    found: list[Source] = []
    for path, size in files:
        if bare(path).endswith(LINE_ENDINGS):
            found.append(JsonLines(path, [path], size))
        elif bare(path).endswith(TAR_ENDINGS):
            found.append(Tar(path, [path], size))
        elif bare(path).endswith(PARQUET_ENDINGS):
            found.append(Parquet(path, size, text_field))
    return found


def _files(corpus: str) -> list[tuple[str, int | None]]:
    """Paths and sizes of the files in a folder, of those that match a pattern, or of one file.

    They are sorted; hidden files and links to folders are left out. A size is None if it is unknown.
    """
    check_protocol(corpus)
    remote = is_remote(corpus)
    if remote and not any(mark in bare(corpus) for mark in "*?[") and bare(corpus).endswith(DATA_ENDINGS):
        return [(corpus, None)]  # web servers seldom list folders, so a single file is not looked for
    system, root = filesystem(corpus)

    def look() -> tuple[dict[str, Any], bool]:
        """What is there, and whether the name is a pattern; a file or folder may have a bracket in its name."""
        if system.isdir(root):
            return system.find(root, detail=True), False
        if system.exists(root):
            return {root: system.info(root)}, False
        return (system.glob(root, detail=True), True) if any(mark in root for mark in "*?[") else ({}, False)

    found, pattern = retry(look, corpus) if remote else look()
    result = []
    for path in sorted(found):
        below = Path(path).name if pattern else path.removeprefix(root).lstrip("/")
        # of files of this machine, fsspec takes a link for something else than a file
        is_file = found[path].get("type") == "file" if remote else Path(path).is_file()
        if is_file and not any(part.startswith(".") for part in below.split("/")):
            result.append((system.unstrip_protocol(path) if remote else path, found[path].get("size")))
    return result
