"""`Measurement`: sums of the losses of one protocol at one length. `add_block` adds a block of text to them."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kerple.measure.protocols import Protocol, full
from kerple.measure.results import Row
from kerple.model.network import Network

if TYPE_CHECKING:
    from kerple.measure.metrics import ContextGain, TokenLoss


@dataclass(eq=False)
class Measurement:
    """The sums of losses of one protocol at one length.

    Args:
        protocol: The protocol.
        length: Evaluation length L in tokens.
        loss: A sum for each block of text, or with ``per_position`` for each position in the segment.
        skip_reason: Why the length cannot be measured, or None.
    """

    protocol: Protocol
    length: int
    loss: "TokenLoss"
    skip_reason: str | None = None

    @property
    def skipped(self) -> dict[str, Any]:
        """The entry of a skipped measurement in the results."""
        return {"protocol": self.protocol.label, "length": self.length, "reason": self.skip_reason}

    def rows(self) -> Iterator[Row]:
        """Rows of the results: nats of each block or position, and the bits of the whole text."""
        if self.skip_reason:
            return
        by_position, label = self.protocol.name == "per_position", self.protocol.label
        for i, (nats, targets) in enumerate(zip(self.loss.nll.tolist(), self.loss.targets.tolist(), strict=True)):
            position, block = (i, None) if by_position else (None, i)
            yield Row("ppl", label, self.length, position, block, nats, targets)
        if self.loss.bytes.any() and not by_position:
            bits = float(self.loss.nll.sum()) / math.log(2)
            yield Row("bits_per_byte", label, self.length, None, None, bits, int(self.loss.bytes.sum()))

    def scalars(self) -> dict[str, float]:
        """Perplexity, and bits per byte if the text has bytes, by name; none for ``per_position`` or if skipped."""
        if self.skip_reason or self.protocol.name == "per_position":
            return {}
        name = f"{self.protocol.label}/{self.length}"
        scalars = {f"ppl/{name}": float(self.loss.perplexity())}
        if self.loss.bytes.any():
            scalars[f"bits_per_byte/{name}"] = float(self.loss.bits_per_byte())
        return scalars


def add_block(
    network: Network,
    tokens: Tensor,
    block: int,
    measurements: Iterable[Measurement],
    token_bytes: Tensor | None = None,
    gain: "ContextGain | None" = None,
) -> None:
    """Add the losses of one block to every measurement that is not skipped.

    The losses of `full` are computed once for all protocols that use them.

    Args:
        network: The model.
        tokens: The block, (1, N+1) int64.
        block: Number of the block.
        measurements: The measurements.
        token_bytes: Number of bytes of text of each token id, (V,) int64; None for no bits per byte.
        gain: The metric to update with the losses of full and windowed at its length; None for no context gain.
    """
    full_losses: dict[int, Tensor] = {}  # losses (1, N) at each length
    targets = tokens[:, 1:]  # (1, N)
    for m in measurements:
        if m.skip_reason:
            continue
        scored = m.protocol.scored_targets(m.length, targets.shape[1]).to(tokens.device)
        if m.protocol.part_of_full(m.length):
            if m.length not in full_losses:
                full_losses[m.length] = full(network, tokens, m.length)
            losses = full_losses[m.length][:, scored]  # (1, n)
        else:
            losses = m.protocol(network, tokens, m.length)
        if gain is not None and m.protocol.name == "windowed" and m.length == gain.length:
            gain.update(*(x.unflatten(1, (-1, m.length)) for x in (full_losses[m.length], losses)))
        if m.protocol.name == "per_position":
            m.loss.update(losses.unflatten(1, (-1, m.length)))  # (1, N / L, L)
        else:
            m.loss.update(losses, block, None if token_bytes is None else token_bytes[targets[:, scored]])
