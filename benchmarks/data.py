"""Processor time of reading training batches, compared with litdata and with a plain loop over a memory map.

Run it with ``python -m benchmarks.data FOLDER``. FOLDER has prepared shards, for example data/code-demo-bpe2048 after
``make demo``. All sides read the same tokens in random order, and return int64 tensors (B, T + 1). Each side is a
process with one thread, and the processes take turns. The table shows the nanoseconds for a token, and the ratio of
our time to that of the other side.

litdata is compared if it is installed. It does not belong to the lock, because it requires torchvision, which this
comparison does not need: ``pip install --no-deps --target DIRECTORY litdata boto3 botocore jmespath s3transfer obstore
tifffile python-dateutil six``, and ``PYTHONPATH=DIRECTORY``.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.measure import in_processes, ratio
from kerple.data import TokenShards

TOKENS = 2**20  # number of tokens of a turn


def ours(folder: str, batch: int, length: int, **options: Any) -> Iterator[Any]:
    """Yield the batches of `TokenShards` with these options, epoch after epoch."""
    options = {"vocabulary": 2**16} | options
    loader = TokenShards(None, directory=folder, length=length, batch_size=batch, **options).train_dataloader()
    while True:
        yield from loader


def litdata(folder: str, batch: int, length: int) -> Iterator[Any]:
    """Yield batches of litdata's streaming dataset of blocks of tokens."""
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    dataset = StreamingDataset(folder, item_loader=TokensLoader(length + 1), shuffle=True, drop_last=True)
    loader = StreamingDataLoader(dataset, batch_size=batch, drop_last=True)
    while True:
        yield from (tokens.long() for tokens in loader)


def memory_map(file: str, batch: int, length: int) -> Iterator[Any]:
    """Yield batches of a loop that reads samples at random places of one mapped file."""
    tokens, generator = np.memmap(file, np.uint16, "r"), torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(tokens) - length, (batch,), generator=generator).tolist()
        rows = [torch.from_numpy(tokens[start : start + length + 1].astype(np.int64)) for start in starts]
        yield torch.stack(rows)


def turn(side: Callable[..., Iterator[Any]], path: str, batch: int, length: int) -> Callable[[], object]:
    """Return a function that reads `TOKENS` tokens of a side, which is one of the three functions above."""
    batches = side(path, batch, length)
    return lambda: sum(1 for _ in islice(batches, TOKENS // (batch * length)))


def part(file: str, bounds: tuple[int, int]) -> Iterator[torch.Tensor]:
    """Yield a part of the tokens, which litdata stores."""
    yield torch.from_numpy(np.fromfile(file, np.uint16)[slice(*bounds)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="folder of prepared shards")
    parser.add_argument("--shapes", nargs="*", default=["32x128", "8x512"], help="batch size x length")
    parser.add_argument("--repeats", type=int, default=15, help="number of turns of each shape")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        tokens = TokenShards(None, directory=options.folder, vocabulary=2**16).text("train").stream[:]
        tokens.astype(np.uint16).tofile(flat := str(Path(scratch) / "tokens.u16"))
        sides: dict[str, Any] = {"ours": (ours, options.folder), "memory map": (memory_map, flat)}
        if find_spec("litdata"):
            from litdata import TokensLoader, optimize

            inputs = [(first, first + 2**18) for first in range(0, len(tokens), 2**18)]
            folder = str(Path(scratch) / "litdata")
            optimize(partial(part, flat), inputs, folder, chunk_bytes="64MB", item_loader=TokensLoader(), num_workers=1)
            sides["litdata"] = (litdata, folder)
        else:
            print("litdata is not installed; its column is left out")
        print("| ns per token, ours / theirs |", " | ".join(sides), "|\n|---|" + "---|" * len(sides))
        for shape in options.shapes:
            builders = {name: partial(turn, *side, *map(int, shape.split("x"))) for name, side in sides.items()}
            seconds = in_processes(builders, options.repeats)
            cells = [f"{median(seconds['ours']) / TOKENS * 1e9:.2f}"]
            for name in list(sides)[1:]:
                middle, low, high = ratio(seconds["ours"], seconds[name])
                cells.append(f"{median(seconds[name]) / TOKENS * 1e9:.2f}, {middle:.2f} [{low:.2f}, {high:.2f}]")
            print(f"| {shape} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
