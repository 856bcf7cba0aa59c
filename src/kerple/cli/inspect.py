"""`python run.py inspect data/…`: shows what a folder of shards holds, and compares it with the manifest."""

import random

import numpy as np
import pandas as pd

from kerple.base.errors import UserError
from kerple.cli.arguments import command_parser, parse
from kerple.data.manifest import SPLITS
from kerple.data.shards import Folder, verify


def main(arguments: list[str]) -> None:
    """Print statistics and a decoded sample, and compare all checksums.

    Args:
        arguments: Arguments of the command.

    Raises:
        UserError: An argument is out of range, or a file differs from the manifest.
    """
    parser = command_parser("inspect", __doc__)
    parser.add_argument("directory", type=str, help="folder of shards, with a manifest.json")
    parser.add_argument("--split", default="train", choices=SPLITS, help="split the sample is drawn from")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of the sample")
    parser.add_argument("--seed", type=int, default=None, help="draw the same sample again")
    parser.add_argument("--documents", action="store_true", help="list the test documents with their overlap")
    parser.add_argument("--no-verify", action="store_true", help="do not read all shards to compare checksums")
    options = parse(parser, arguments)
    if options.tokens < 0:
        raise UserError(f"tokens: got {options.tokens}, expected 0 or more")
    folder = Folder(options.directory)
    show(folder)
    if options.documents:
        print(printable(folder.test_documents().to_csv(index=False)), end="")
    print(sample(folder, options.split, options.tokens, options.seed))
    if not options.no_verify:
        verify(folder)
        print("every checksum is right")


def show(folder: Folder) -> None:
    """Print the statistics of a folder's manifest, and how much its test text overlaps with the training text."""
    manifest, tested = folder.manifest, folder.test_documents()
    rows = []
    for split in manifest.splits.values():
        counts = [f"{number:,}" for number in (split.documents, split.tokens, split.bytes)]
        means = [f"{split.bytes_per_token:.3f}", f"{split.tokens / max(split.documents, 1):.0f}"]
        rows.append([*counts, *means, str(sum(shard.tokens > 0 for shard in split.shards))])
    names = ["documents", "tokens", "bytes", "bytes per token", "tokens per document", "shards"]
    print(f"{printable(str(folder.directory))}\n{pd.DataFrame(rows, list(manifest.splits), names).to_string()}")
    for line in (
        f"vocabulary {manifest.vocabulary}, {manifest.dtype}, end of text {manifest.end_of_text}",
        f"prepared from {manifest.settings}",
        f"left out: {manifest.left_out or 'nothing'}",
        f"sha256 of the text {manifest.text}",
        f"of its {len(tested)} test documents, {(tested.overlap > 0.5).sum()} share more than half of their runs of 32 "
        f"tokens with the training text, the mean document {tested.overlap.mean():.2%}",
    ):
        print(printable(line))


def sample(folder: Folder, split: str, count: int, seed: int | None = None) -> str:
    """Decode `count` tokens from a random position in a split, below a line that names the position."""
    stream, documents = folder.stream(split), folder.documents(split)
    count = min(count, len(stream))
    start = random.Random(seed).randint(0, len(stream) - count)
    document = int(np.searchsorted(documents, start, side="right")) - 1
    text = folder.tokenizer().decode(stream.read(start, count).tolist(), skip_special_tokens=False)
    return printable(f"--- {split}, tokens {start} .. {start + count - 1}, document {document}\n{text}\n---")


def printable(text: str) -> str:
    """The text with question marks for what UTF-8 cannot encode, such as bytes of a path that are not Unicode."""
    return text.encode("utf-8", "replace").decode()
