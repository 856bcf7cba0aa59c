"""`Measurement`: the sums of one protocol at one length; and the rows, the table and the figure made of them."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor

from kerple.base.errors import UserError
from kerple.evaluation.context_gain import ContextGain
from kerple.evaluation.metrics import TokenLoss
from kerple.evaluation.protocols import TOKENS_PER_FORWARD, Network, Protocol, full

OWN_TABLES = ("results", "summary", "costs")  # tables of a report, whose names no analysis can have
VERSION = 2  # of the file; in version 1, bytes were those of an average token of the split instead of each target's


@dataclass
class Measurement:
    """The sums of losses of one protocol at one length.

    Args:
        protocol: The protocol.
        length: Evaluation length L in tokens.
        loss: Sums for each block of text.
        by_position: Sums for each position in the segment, only for ``per_position``.
        skipped: Why the length cannot be measured, or None.
    """

    protocol: Protocol
    length: int
    loss: TokenLoss
    by_position: TokenLoss | None = None
    skipped: str | None = None

    def row(self) -> dict[str, Any]:
        """The row for `extrapolation.json`. Intervals come from its sums by block; None is a number that is
        not finite."""
        return {
            "protocol": self.protocol.name,
            "length": self.length,
            "window": self.protocol.window,
            "stride": self.protocol.stride,
            "skip": self.protocol.skip,
            "k": self.protocol.k,
            "nll_sum": finite(self.loss.nll.sum()),
            "targets": int(self.loss.targets.sum()),
            "ppl": finite(self.loss.perplexity()),
            "bytes": int(self.loss.bytes.sum()),
            "bits_per_byte": finite(self.loss.bits_per_byte()),
            "block_nll": [finite(x) for x in self.loss.nll],
            "block_targets": self.loss.targets.tolist(),
        }


def plan(
    protocols: Iterable[Protocol],
    lengths: Iterable[int],
    *,
    groups: int,
    reach: int | None,
    device: torch.device,
) -> list[Measurement]:
    """Empty measurements, one for each protocol and length.

    Args:
        protocols: The protocols.
        lengths: Evaluation lengths in tokens.
        groups: Number of blocks of text.
        reach: Number of positions of the strategy; measurements of longer lengths are marked as skipped. None for any.
        device: Where the sums are kept.
    """
    made = []
    for protocol in protocols:
        for length in lengths:
            positions = TokenLoss(length).to(device) if protocol.name == "per_position" else None
            why = None
            if reach is not None and length > reach:
                why = f"the strategy has no position past {reach - 1} (its max_length is {reach})"
            made.append(Measurement(protocol, length, TokenLoss(groups).to(device), positions, why))
    return made


def measure(
    network: Network,
    tokens: Tensor,
    group: int,
    measurements: Iterable[Measurement],
    tokens_per_forward: int = TOKENS_PER_FORWARD,
    token_bytes: Tensor | None = None,
    gain: ContextGain | None = None,
) -> None:
    """Add the losses of one block to every measurement that is not skipped.

    What `full` has computed is not computed again: `per_position` and `last` are parts of it, and a window as long as
    the segment takes nothing away.

    Args:
        network: The model.
        tokens: (1, N+1) int64.
        group: Number of the block.
        measurements: The measurements.
        tokens_per_forward: Largest number of tokens in one forward pass.
        token_bytes: Number of bytes of text of each token id, (V,) int64; None leaves bits per byte out.
        gain: Is given the losses of its length in full and with its window; None for no context gain.
    """
    shared: dict[int, Tensor] = {}  # by length, in full
    targets = tokens[:, 1:]  # (1, N)
    for m in measurements:
        if m.skipped is not None:
            continue
        scored = m.protocol.scored(m.length, targets.shape[1]).to(tokens.device)
        alike = (m.protocol.window or 0) >= m.length
        if m.protocol.name in ("full", "per_position") or alike:
            if m.length not in shared:
                shared[m.length] = full(network, tokens, m.length, tokens_per_forward=tokens_per_forward)
            losses = shared[m.length]
        elif m.protocol.name == "last" and m.length in shared:
            losses = shared[m.length][:, scored]
        else:
            losses = m.protocol(network, tokens, m.length, tokens_per_forward)
        if gain is not None and m.protocol.name == "windowed" and m.length == gain.length and m.length in shared:
            gain.update(*(of.unflatten(1, (-1, m.length)) for of in (shared[m.length], losses)))
        m.loss.update(losses, group, None if token_bytes is None else token_bytes[targets[:, scored]])
        if m.by_position is not None:
            m.by_position.update(losses.unflatten(1, (-1, m.length)))  # (1, N / L, L)


def table(measurements: Sequence[Measurement], training_length: int) -> Table:
    """Table of perplexity and bits per byte: a row per length, a column per protocol, notes on skipped lengths."""
    made = Table(title="Perplexity (bits per byte) by evaluation length", caption_justify="left")
    made.add_column("length", justify="right")
    made.add_column("×", justify="right")
    cells = {(m.protocol.label, m.length): m for m in measurements}
    labels = list(dict.fromkeys(m.protocol.label for m in measurements))
    for label in labels:
        made.add_column(label, justify="right")
    for length in dict.fromkeys(m.length for m in measurements):
        ratio = f"{length / training_length:g}"
        made.add_row(f"{length:,}", ratio, *(_cell(cells.get((label, length))) for label in labels))
    counted = sorted({f"{m.protocol.label} {int(m.loss.targets.sum()):,}" for m in measurements if m.skipped is None})
    notes = [f"{m.protocol.label} at {m.length:,}: skipped, {m.skipped}" for m in measurements if m.skipped is not None]
    made.caption = "\n".join([*(f"targets scored: {of}" for of in counted), *notes])
    return made


def figure(measurements: Sequence[Measurement], training_length: int, title: str) -> Figure:
    """Figure of perplexity against length, a line per protocol, with a mark at the training length."""
    drawn = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = drawn.add_subplot()
    values: list[float] = []
    for label in dict.fromkeys(m.protocol.label for m in measurements):
        at_label = [m for m in measurements if m.protocol.label == label and m.skipped is None]
        points = [(m.length, ppl) for m in at_label if (ppl := finite(m.loss.perplexity())) is not None]
        values += [ppl for _, ppl in points]
        if points:
            behind = f" (targets from {at_label[0].protocol.skip:,} on)" if at_label[0].protocol.skip else ""
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label + behind)
    axes.axvline(
        training_length, color="0.6", linestyle="--", linewidth=1, label=f"training length {training_length:,}"
    )
    axes.set_xscale("log", base=2)
    ticks = list(dict.fromkeys(m.length for m in measurements))
    axes.set_xticks(ticks, [f"{t:,}" for t in ticks], rotation=30 if len(ticks) > 6 else 0)
    axes.minorticks_off()
    if values and max(values) > 4 * min(values):
        axes.set_yscale("log")
    axes.set(xlabel="evaluation length (tokens)", ylabel="perplexity (per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    return drawn


def write(path: Path, measurements: Sequence[Measurement], **about: Any) -> None:
    """Write a JSON file: the entries ``about`` the run, the rows, the skipped lengths, and the sums by position."""
    content = (
        {"version": VERSION}
        | about
        | {
            "rows": [m.row() for m in measurements if m.skipped is None],
            "skipped": [
                {"protocol": m.protocol.label, "length": m.length, "reason": m.skipped}
                for m in measurements
                if m.skipped is not None
            ],
            "by_position": [
                {"length": m.length, "nll_sum": [finite(x) for x in p.nll], "targets": p.targets.tolist()}
                for m in measurements
                if m.skipped is None and (p := m.by_position) is not None
            ],
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, allow_nan=False, ensure_ascii=False, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def finite(number: Tensor | float) -> float | None:
    """The number, or None if it is NaN or infinite, which strict JSON cannot hold."""
    value = float(number)
    return value if math.isfinite(value) else None


def reach(network: Any) -> int | None:
    """The first position that a strategy of the network cannot represent, or None if there is no such position."""
    strategies = getattr(network, "positions", [network])
    bounds = [p.max_length for p in strategies if getattr(p, "max_length", None) is not None]
    return min(bounds, default=None)


def strategy(network: Any) -> str:
    """Name of the network's strategy: its class, or for a pretrained network the name that it gives."""
    return network.strategy if hasattr(network, "strategy") else type(network.positions[0]).__name__


def _cell(m: Measurement | None) -> str:
    if m is None or m.skipped is not None:
        return "skipped"
    ppl = finite(m.loss.perplexity())
    if ppl is None:
        return "overflow"
    return f"{ppl:,.2f} ({float(m.loss.bits_per_byte()):.3f})" if m.loss.bytes.any() else f"{ppl:,.2f}"


def check_counts(m: Measurement, block: int, partly: bool) -> None:
    """Check that every block was scored once: Lightning's own distributed sampler repeats or drops some.

    Args:
        m: The measurement.
        block: Targets in a block.
        partly: Whether some blocks may not have been scored at all.

    Raises:
        UserError: A block was scored more than once, or not at all.
    """
    expected = 0 if m.skipped is not None else len(m.protocol.scored(m.length, block))
    allowed = {0, expected} if partly else {expected}
    wrong = [i for i, n in enumerate(m.loss.targets.tolist()) if n not in allowed]
    if wrong:
        raise UserError(
            f"trainer.use_distributed_sampler: got blocks {wrong[:8]} that were not scored exactly once "
            f"({m.protocol.label} at {m.length}), expected false, with which the test loader gives every block to one "
            "device"
        )
