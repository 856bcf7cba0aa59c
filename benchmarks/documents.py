"""Cost of document masks and of packing, compared with a stream: ``python -m benchmarks.documents``.

The first table has the processor time of a training step within documents, divided by that of a step on a stream, for
the demo's network in fp32. Documents have a tenth of the length on average. With ``--folder``, a folder of prepared
shards, the second table has the same ratios for reading training batches. All sides take turns in one process with one
thread. A cell is the median, with the quartiles.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.data import ours, turn
from benchmarks.measure import in_turn, machine, ratio
from benchmarks.models import build, training_step

SHAPES = ((8, 128), (4, 512), (1, 2048))  # batch size and length
STRATEGIES = ("NoPE", "KerpleLog", "RoPE", "window")
READERS: dict[str, dict[str, Any]] = {
    "stream": {},
    "masked": {"mask_documents": True},
    "packed": {"mask_documents": True, "packing": "best_fit"},
}


def step(strategy: str, batch: int, length: int, masked: bool) -> Callable[[], None]:
    """Return a training step with a strategy, or with RoPE and a window of a quarter of the length."""
    torch.manual_seed(0)
    if strategy == "window":
        network = build("demo", "LayerPattern", length, kinds={"local": "RoPE"}, windows={"local": length // 4})
    else:
        network = build("demo", strategy, length)
    documents = (torch.rand(batch, length + 1) < 10 / length).long().cumsum(1)
    return training_step(network, batch, length, bf16=False, documents=documents if masked else None)


def cells(sides: Mapping[str, Callable[[], object]], pairs: list[tuple[str, str]], repeats: int) -> str:
    """Return the ratios of the sides in each pair, as cells of a row of a table."""
    seconds = in_turn(sides, repeats, time.process_time)
    ratios = (ratio(seconds[one], seconds[other]) for one, other in pairs)
    return " | ".join(f"{middle:.2f} [{low:.2f}, {high:.2f}]" for middle, low, high in ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="folder of prepared shards")
    parser.add_argument("--repeats", type=int, default=12, help="number of turns of each side")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine(), "\n\n| step, masked / stream |", " | ".join(STRATEGIES), "|\n|---|" + "---|" * len(STRATEGIES))
    for batch, length in SHAPES:
        steps = {
            f"{name} {masked}": step(name, batch, length, masked) for name in STRATEGIES for masked in (True, False)
        }
        pairs = [(f"{name} True", f"{name} False") for name in STRATEGIES]
        print(f"| {batch} × {length:,} |", cells(steps, pairs, options.repeats), "|", flush=True)
    if options.folder:
        print("\n| reading, compared with a stream | masked | packed |\n|---|---|---|")
        for batch, length in SHAPES:
            readers = {
                name: turn(partial(ours, **settings), options.folder, batch, length)
                for name, settings in READERS.items()
            }
            pairs = [("masked", "stream"), ("packed", "stream")]
            print(f"| {batch} × {length:,} |", cells(readers, pairs, options.repeats), "|", flush=True)


if __name__ == "__main__":
    main()
