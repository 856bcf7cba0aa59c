"""`python run.py inspect data/…`: prints statistics and a sample of a folder of shards, and verifies its checksums."""

import math
import random

import numpy as np

from kerple.base.errors import require
from kerple.config.options import add_switch, command_parser, rename_options
from kerple.config.parsing import parse
from kerple.data.manifest import SPLITS
from kerple.data.shards import Folder, TokenStream, verify


def main(arguments: list[str]) -> None:
    """Print statistics and a decoded sample, and verify all checksums.

    Args:
        arguments: Arguments of the command.

    Raises:
        UserError: If an argument is out of range, or a file differs from the manifest.
    """
    parser = command_parser("inspect", __doc__)
    parser.add_argument("directory", type=str, help="folder of shards, with a manifest.json")
    parser.add_argument("--split", default="train", choices=SPLITS, help="split of the sample")
    parser.add_argument("--length", type=int, default=200, help="number of tokens of the sample")
    parser.add_argument("--seed", type=int, default=None, help="seed of sampling; null: a random one")
    add_switch(parser, "documents", False, "list each test document and its overlap")
    add_switch(parser, "verify", True, "verify all checksums, which reads all shards")
    rename_options(parser, tokens="length")
    rename_options(parser, " false", **{"no-verify": "verify"})
    options = parse(parser, arguments)
    require(options.length >= 0, "length", options.length, "0 or more")
    folder = Folder(options.directory)
    show(folder)
    if options.documents:
        print(printable(folder.test_documents().to_csv(index=False)), end="")
    print(sample(folder, options.split, options.length, options.seed))
    if options.verify:
        verify(folder)
        print("all checksums are correct")


def show(folder: Folder) -> None:
    """Print the statistics in the manifest of a folder of shards, and the overlap of test text and training text."""
    import pandas as pd  # here, so that mistakes in options are reported before it is imported

    manifest, test = folder.manifest, folder.test_documents()
    rows = []
    for split in manifest.splits.values():
        counts = [f"{number:,}" for number in (split.documents, split.tokens, split.bytes)]
        bytes_per_token = split.bytes / split.tokens if split.tokens else math.nan
        means = [f"{bytes_per_token:.3f}", f"{split.tokens / max(split.documents, 1):.0f}"]
        rows.append([*counts, *means, str(sum(shard.tokens > 0 for shard in split.shards))])
    names = ["documents", "tokens", "bytes", "bytes per token", "tokens per document", "shards"]
    lines = [
        folder.location,
        pd.DataFrame(rows, list(manifest.splits), names).to_string(),
        f"vocabulary {manifest.vocabulary}, {manifest.dtype}, end of text {manifest.end_of_text}",
        f"settings {manifest.settings}",
        f"documents left out of the shards: {manifest.left_out or 'none'}",
        f"sha256 of the text {manifest.text}",
        f"overlap (fraction of 32-token sequences that the training text contains): mean {test.overlap.mean():.2%}, "
        f"above 50% in {(test.overlap > 0.5).sum()} of {len(test)} test documents",
    ]
    print(printable("\n".join(lines)))


def sample(folder: Folder, split: str, count: int, seed: int | None = None) -> str:
    """Return the text of ``count`` tokens from a random position in a split, after a line with the position.

    A split with fewer tokens is decoded completely.
    """
    stream, documents = TokenStream(folder, split), folder.documents(split)
    count = min(count, len(stream))
    start = random.Random(seed).randint(0, len(stream) - count)
    document = int(np.searchsorted(documents, start, side="right")) - 1
    text = folder.tokenizer().decode(stream[start : start + count].tolist(), skip_special_tokens=False)
    return printable(f"--- {split}, tokens {start} .. {start + count - 1}, document {document}\n{text}\n---")


def printable(text: str) -> str:
    """Replace characters that UTF-8 cannot encode with question marks. Such characters come from paths not in UTF-8."""
    return text.encode("utf-8", "replace").decode()
