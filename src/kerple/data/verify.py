"""Comparison of the files in a folder of shards with its manifest."""

import hashlib
from pathlib import Path

import numpy as np
from tqdm import tqdm

from kerple.base.errors import UserError
from kerple.data.manifest import SPLITS, Manifest
from kerple.data.shards import TokenStream


def read_offsets(directory: Path, manifest: Manifest, split: str) -> np.memmap:
    """Index of the first token of each document of a split, (documents,) uint64, mapped from `<split>.offsets`.

    Raises:
        UserError: The file is missing, its size or checksum differs from the manifest's, or the indices do not begin at
            0 and rise.
    """
    expected, path = manifest.splits[split], directory / manifest.splits[split].offsets_file
    if not path.is_file() or path.stat().st_size != 8 * expected.documents:
        raise UserError(
            f"{path}: must be a file of 8 bytes for each of {expected.documents} documents; prepare or copy it again"
        )
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != expected.offsets:
            raise UserError(f"{path}: its sha256 is not the manifest's; prepare or copy the folder again")
    if not expected.documents:
        return np.empty(0, "<u8")  # type: ignore[return-value]
    offsets = np.memmap(path, "<u8", mode="r")
    if offsets[0] or offsets[-1] >= expected.tokens or (offsets[1:] <= offsets[:-1]).any():
        raise UserError(f"{path}: must rise from 0 to below the {expected.tokens} tokens; prepare the folder again")
    return offsets


def verify(directory: Path, manifest: Manifest, progress: bool = True) -> None:
    """Read the tokenizer, all shards and all offsets of a folder, and compare them with its manifest.

    Args:
        directory: Folder of the shards.
        manifest: The manifest of that folder.
        progress: Whether to show a progress bar and say that all is well.

    Raises:
        UserError: A file or a member differs; the message names the first one.
    """
    tokenizer_file(directory, manifest)
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


def tokenizer_file(directory: Path, manifest: Manifest) -> Path:
    """Path of the tokenizer that the shards were made with.

    Raises:
        UserError: It is missing, or is not the one that the manifest names.
    """
    path = directory / "tokenizer.json"
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != manifest.tokenizer:
        raise UserError(f"{path}: is missing or its sha256 is not the manifest's; prepare or copy the folder again")
    return path
