"""Memory and time of activation checkpointing: ``python -m benchmarks.checkpointing``.

A training step is a forward and a backward pass in fp32 on one thread. The gradients exist before it, so that its peak
memory is that of activations, logits and copies. Times are processor time. The variants of a table are processes that
take turns, and a ratio is the median over the turns. The tables are written to results/cost/checkpointing.md.

The first table compares `Transformer.checkpoint_activations` with `torch.utils.checkpoint` around hand-written blocks.
The second table compares the memory of the model with 162M parameters with that of `python run.py plan`.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.measure import in_processes, machine, peak_above, ratio
from benchmarks.models import SIZES
from benchmarks.peers import PlainBlock, PlainTransformer
from kerple.model import Transformer
from kerple.model.cost import memory
from kerple.positions import Shape, strategies

TABLE = Path(__file__).parents[1] / "results/cost/checkpointing.md"
LAYERS = 12  # of the first table, whose width and vocabulary are those of the demo
SMALL = [(name, mode) for name in ("NoPE", "hand-written") for mode in ("", "checkpointing")]
LARGE = [("KerpleLog", mode) for mode in ("", "checkpointing")]


class Checkpointed(PlainTransformer):
    """Hand-written blocks without positions, with torch's checkpointing around each block, or without it."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__(kerple=False)
        self.blocks, self.checkpoints = nn.ModuleList([PlainBlock() for _ in range(LAYERS)]), checkpoints

    def losses(self, tokens: Tensor) -> Tensor:
        """Return the losses of the targets of tokens (B, T + 1)."""
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = checkpoint(block, x, None, use_reentrant=False) if self.checkpoints else block(x, None)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")


def network(size: str, name: str, length: int) -> Transformer:
    """Return the demo's network with `LAYERS` layers, or the network with 162M parameters."""
    dim, heads, layers, vocabulary = SIZES[size]
    return Transformer(Shape(dim, heads, length), LAYERS if size == "demo" else layers, vocabulary, strategies()[name])


def step(size: str, name: str, mode: str, batch: int, length: int) -> Callable[[], None]:
    """Return a function that makes a training step on random tokens, after a first step, which makes the gradients."""
    torch.manual_seed(0)
    model: Transformer | Checkpointed
    if name == "hand-written":
        model = Checkpointed(checkpoints=bool(mode))
    else:
        model = network(size, name, length)
        model.checkpoint_activations = bool(mode)
    tokens = torch.randint(2048, (batch, length + 1))

    def run() -> None:
        model.losses(tokens).mean().backward()

    run()
    return run


def measured(size: str, variants: list[tuple[str, str]], batch: int, length: int, turns: int) -> pd.DataFrame:
    """Return a row for each variant: its name, its memory in MiB, seconds, and time relative to no checkpointing."""
    builders = {f"{name} {mode}".strip(): partial(step, size, name, mode, batch, length) for name, mode in variants}
    seconds, rows = in_processes(builders, turns) if turns else {}, []
    for (name, mode), label in zip(variants, builders, strict=True):
        script = "import torch; torch.set_num_threads(1)\nfrom benchmarks.checkpointing import step\n"
        peak = peak_above(f"{script}measured = step({size!r}, {name!r}, {mode!r}, {batch}, {length})")
        row = {"step": f"{batch} × {length}", "blocks": name, "mode": mode or "–", "memory (MiB)": f"{peak:,.0f}"}
        if size != "demo":
            with torch.device("meta"):
                planned = network(size, name, length)
            planned.checkpoint_activations = bool(mode)
            parts = memory(planned, batch, length, None)
            row["`plan` (MiB)"] = f"{(parts['activations'] + parts['logits']) / 2**20:,.0f}"
        if turns:
            middle, low, high = ratio(seconds[label], seconds[label.removesuffix(" checkpointing")])
            row |= {"seconds": f"{statistics.median(seconds[label]):.2f}"}
            row["time ÷ without"] = f"{middle:.2f} [{low:.2f}, {high:.2f}]" if mode else "1"
        rows.append(row)
        print(rows[-1], flush=True)
    return pd.DataFrame(rows).fillna("–")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument(
        "--large_turns", type=int, default=3, help="turns of the model with 162M parameters; 0: only its memory"
    )
    options = parser.parse_args()
    shapes = (4, 512), (1, 2048)
    small = pd.concat([measured("demo", SMALL, *shape, options.turns) for shape in shapes])
    write(small, None, options.turns, options.large_turns)
    write(small, measured("162M", LARGE, 1, 512, options.large_turns), options.turns, options.large_turns)


def write(small: pd.DataFrame, large: pd.DataFrame | None, turns: int, large_turns: int) -> None:
    """Write the tables that are measured so far to `TABLE`."""
    at = machine()
    about = (
        "`python -m benchmarks.checkpointing` wrote this page. A step is a forward and a backward pass in fp32 on one "
        f"thread. Times are processor time, medians of {turns} turns, with quartiles of the ratio. Memory is the peak "
        f"above weights and gradients. {at['cpu']}, load {at['load']:.0f} on {at['cores']} cores, torch {at['torch']}."
    )
    parts = [f"## {LAYERS} layers of width 128, vocabulary 2,048\n\n{markdown(small)}"]
    if large is not None:
        note = f"Times are medians of {large_turns} turns. " if large_turns else ""
        note += "The column `plan` is the memory of activations and logits that it computes for a GPU."
        parts.append(f"## 162M parameters\n\n{note}\n\n{markdown(large)}")
    TABLE.write_text("\n\n".join(["# Activation checkpointing", about, *parts]) + "\n", encoding="utf-8")


def markdown(table: pd.DataFrame) -> str:
    """Return a table in Markdown, whose first three columns are text and whose other columns are numbers."""
    rows = [list(table.columns), ["---"] * 3 + ["---:"] * (len(table.columns) - 3), *table.values.tolist()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    main()
