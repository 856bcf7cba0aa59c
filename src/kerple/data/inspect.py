"""`python run.py inspect data/…`: what is in a folder of shards, and whether it still is what the manifest says."""

import argparse
import hashlib
import random
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from kerple.data.manifest import SPLITS, Manifest, read_manifest
from kerple.data.shards import TokenStream
from kerple.data.tokenizer import load_tokenizer


def main(arguments: list[str]) -> None:
    """Print statistics and a decoded sample, verify every checksum.

    Raises:
        ValueError: A file is not what the manifest says.
    """
    parser = argparse.ArgumentParser(prog="run.py inspect", description=__doc__)
    parser.add_argument("directory", type=Path, help="folder with a manifest.json")
    parser.add_argument("--split", default="train", choices=SPLITS, help="split the sample is drawn from")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of the sample")
    parser.add_argument("--seed", type=int, default=None, help="draw the same sample again")
    parser.add_argument("--no-verify", action="store_true", help="do not read and compare everything")
    given = parser.parse_args(arguments)
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
    """Decode `count` tokens from a random place of a split, and say where they are."""
    stream = TokenStream(directory, manifest, split)
    count = min(count, len(stream))
    start = random.Random(seed).randint(0, len(stream) - count)
    offsets = read_offsets(directory, manifest, split)
    document = int(np.searchsorted(offsets, start, side="right")) - 1
    text = load_tokenizer(str(directory / "tokenizer.json")).decode(
        stream.read(start, count).tolist(), skip_special_tokens=False
    )
    return f"--- {split}, tokens {start} .. {start + count - 1}, document {document}\n{text}\n---"


def read_offsets(directory: Path, manifest: Manifest, split: str) -> np.memmap:
    """Where each document of a split begins in its token stream (documents,) uint64, mapped.

    Raises:
        ValueError: The file is missing, its size or checksum differ, or the documents it tells of are not one behind
            the other from the first token on.
    """
    expected, path = manifest.splits[split], directory / manifest.splits[split].offsets_file
    if not path.is_file() or path.stat().st_size != 8 * expected.documents:
        raise ValueError(f"{path}: must be a file of 8 bytes for each of {expected.documents} documents")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != expected.offsets:
            raise ValueError(f"{path}: its sha256 is not the manifest's; prepare or copy the folder again")
    if not expected.documents:
        return np.empty(0, "<u8")  # type: ignore[return-value]
    offsets = np.memmap(path, "<u8", mode="r")
    if offsets[0] or offsets[-1] >= expected.tokens or (offsets[1:] <= offsets[:-1]).any():
        raise ValueError(f"{path}: must rise from 0 to below the {expected.tokens} tokens; prepare the folder again")
    return offsets


def verify(directory: Path, manifest: Manifest, progress: bool = True) -> None:
    """Read everything and compare it with the manifest.

    Raises:
        ValueError: Names the first file and member that differ.
    """
    path = directory / "tokenizer.json"
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != manifest.tokenizer:
        raise ValueError(f"{path}: is missing or its sha256 is not the manifest's; prepare or copy the folder again")
    total = sum(len(split.checksums) for split in manifest.splits.values())
    with tqdm(total=total, desc="verifying", unit="run", disable=not progress) as bar:
        for split in SPLITS:
            read_offsets(directory, manifest, split)
            stream = TokenStream(directory, manifest, split)
            for run in range(len(stream.split.checksums)):
                stream.run(run)
                bar.update()
    if progress:
        print(f"{directory}: every checksum is right")
