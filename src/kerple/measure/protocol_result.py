"""`ProtocolLosses`: sums of the losses of one protocol at one length, and the numbers that are computed from them."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kerple.measure.protocols import Protocol
from kerple.measure.results_table import Row

if TYPE_CHECKING:
    from kerple.measure.loss_metrics import TokenLoss  # imports torchmetrics, which takes seconds


@dataclass(eq=False)
class ProtocolLosses:
    """The sums of the losses of one protocol at one length.

    Args:
        protocol: The protocol.
        length: Evaluation length L in tokens.
        loss: Sums of losses by block of text, or by position in the segment for the protocol ``per_position``.
    """

    protocol: Protocol
    length: int
    loss: "TokenLoss"

    @property
    def by_position(self) -> bool:
        """Whether losses are summed by position instead of by block."""
        return self.protocol.name == "per_position"

    def rows(self) -> list[Row]:
        """Return rows of the results.

        Each block or position has one row, with the sum of its losses in nats. If the number of bytes of the text is
        known, one more row has the sum of all losses in bits.
        """
        rows = self.loss.rows(self.protocol.label, self.length, self.by_position)
        if self.loss.text_bytes.any():
            bits, count = float(self.loss.nll.sum()) / math.log(2), int(self.loss.text_bytes.sum())
            rows.append(Row("bits_per_byte", self.protocol.label, self.length, None, None, bits, count))
        return rows

    def scalars(self) -> dict[str, float]:
        """Return the perplexity, and bits per byte if the bytes of the text are known; {} for ``per_position``."""
        if self.by_position:
            return {}
        name = f"{self.protocol.label}/{self.length}"
        scalars = {f"ppl/{name}": float(self.loss.perplexity())}
        if self.loss.text_bytes.any():
            scalars[f"bits_per_byte/{name}"] = float(self.loss.bits_per_byte())
        return scalars
