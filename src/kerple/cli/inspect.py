"""`python run.py inspect data/…`: shows what a folder of shards holds, and compares it with the manifest."""

import random
from pathlib import Path

import numpy as np
from jsonargparse import ArgumentParser
from rich.console import Console
from rich.table import Table

from kerple.base.errors import UserError
from kerple.cli.reading import read
from kerple.data.manifest import SPLITS, Manifest, read_manifest
from kerple.data.shards import TokenStream
from kerple.data.tokenizer import load_tokenizer
from kerple.data.verify import read_offsets, verify


def main(arguments: list[str]) -> None:
    """Print statistics and a decoded sample, and verify all checksums.

    Args:
        arguments: Arguments of the command.

    Raises:
        UserError: An argument is out of range, or a file differs from the manifest.
    """
    parser = ArgumentParser(prog="run.py inspect", description=__doc__, exit_on_error=False)
    parser.add_argument("directory", type=Path, help="folder with a manifest.json")
    parser.add_argument("--split", default="train", choices=SPLITS, help="split the sample is drawn from")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of the sample")
    parser.add_argument("--seed", type=int, default=None, help="draw the same sample again")
    parser.add_argument("--no-verify", action="store_true", help="do not read and compare everything")
    given = read(parser, arguments)
    if given.tokens < 0:
        raise UserError(f"tokens: got {given.tokens}, expected 0 or more")
    manifest = read_manifest(given.directory)
    show(manifest)
    print(sample(given.directory, manifest, given.split, given.tokens, given.seed))
    if not given.no_verify:
        verify(given.directory, manifest)


def show(manifest: Manifest) -> None:
    """Print a manifest's statistics as a table."""
    table = Table(title=manifest.place)
    for column in ("split", "documents", "tokens", "bytes", "bytes per token", "tokens per document", "shards"):
        table.add_column(column, justify="left" if column == "split" else "right")
    for split in manifest.splits.values():
        table.add_row(
            split.name,
            f"{split.documents:,}",
            f"{split.tokens:,}",
            f"{split.bytes:,}",
            f"{split.bytes_per_token:.3f}",
            f"{split.tokens / max(split.documents, 1):.0f}",
            str(manifest.layout.shards(split.tokens)),
        )
    console = Console()
    console.print(table)
    console.print(f"vocabulary {manifest.vocabulary}, {manifest.layout.dtype}, end of text {manifest.end_of_text}")
    console.print(f"prepared from {manifest.settings}")
    console.print(f"left out or repeated: {manifest.counts or 'nothing'}")


def sample(directory: Path, manifest: Manifest, split: str, count: int, seed: int | None = None) -> str:
    """Decode `count` tokens at a random place of a split, below a line that says where they are."""
    stream = TokenStream(directory, manifest, split)
    count = min(count, len(stream))
    start = random.Random(seed).randint(0, len(stream) - count)
    offsets = read_offsets(directory, manifest, split)
    document = int(np.searchsorted(offsets, start, side="right")) - 1
    text = load_tokenizer(str(directory / "tokenizer.json")).decode(
        stream.read(start, count).tolist(), skip_special_tokens=False
    )
    return f"--- {split}, tokens {start} .. {start + count - 1}, document {document}\n{text}\n---"
