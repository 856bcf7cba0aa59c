"""`Measurement`: sums of the losses of one protocol at one length. `add_block` adds the losses of a block of text."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial

from torch import Tensor

from kerple.measure.metrics import ContextGain, TokenLoss
from kerple.measure.protocols import Protocol, full
from kerple.measure.results import Row
from kerple.model.network import Network


@dataclass(eq=False)
class Measurement:
    """The sums of the losses of one protocol at one length.

    Args:
        protocol: The protocol.
        length: Evaluation length L in tokens.
        loss: Sums of losses by block of text, or by position in the segment for the protocol ``per_position``.
    """

    protocol: Protocol
    length: int
    loss: TokenLoss

    @property
    def by_position(self) -> bool:
        """Whether losses are summed by position instead of by block."""
        return self.protocol.name == "per_position"

    def rows(self) -> list[Row]:
        """Return rows of the results: nats of each block or position, and bits of the whole text if bytes are known."""
        rows = self.loss.rows(self.protocol.label, self.length, self.by_position)
        if self.loss.text_bytes.any():
            bits, count = float(self.loss.nll.sum()) / math.log(2), int(self.loss.text_bytes.sum())
            rows.append(Row("bits_per_byte", self.protocol.label, self.length, None, None, bits, count))
        return rows

    def scalars(self) -> dict[str, float]:
        """Return perplexity by name, and bits per byte if bytes are known; nothing for ``per_position``."""
        if self.by_position:
            return {}
        name = f"{self.protocol.label}/{self.length}"
        scalars = {f"ppl/{name}": float(self.loss.perplexity())}
        if self.loss.text_bytes.any():
            scalars[f"bits_per_byte/{name}"] = float(self.loss.bits_per_byte())
        return scalars


def add_block(
    network: Network,
    tokens: Tensor,
    block: int,
    measurements: Iterable[Measurement],
    token_bytes: Tensor | None = None,
    gain: ContextGain | None = None,
) -> None:
    """Add the losses of one block to every measurement.

    Args:
        network: The model.
        tokens: The block, (1, N+1) int64.
        block: Number of the block.
        measurements: The measurements.
        token_bytes: Number of bytes of text of each token id, (V,) int64; None for no bits per byte.
        gain: The metric to update with the losses of full and windowed at its length; None for no context gain.
    """
    full_losses = cache(partial(full, network, tokens))  # several protocols use them at the same length
    targets = tokens[:, 1:]  # (1, N)
    for m in measurements:
        losses = m.protocol(network, tokens, m.length, full_losses)  # (1, n)
        if gain is not None and m.protocol.name == "windowed" and m.length == gain.length:
            gain.update(*(x.unflatten(1, (-1, m.length)) for x in (full_losses(m.length), losses)))
        if m.by_position:
            m.loss.update(losses.unflatten(1, (-1, m.length)))  # (1, N / L, L)
        else:
            scored = m.protocol.scored_targets(m.length, targets.shape[1])  # (n,)
            m.loss.update(losses, block, None if token_bytes is None else token_bytes[targets[:, scored]])
