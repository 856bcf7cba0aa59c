"""Context gain: how much the loss falls because a model reads text beyond a window, by position in the segment."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

BINS = 64


class ContextGain(Metric):
    """The loss with full attention, and the loss with a window minus it, in nats per target, by bins of positions.

    Each segment gives one mean for each bin, and the standard error is over segments, because the targets inside a
    segment are far from independent. Segments of one document are not quite independent either, see
    `kerple.compare.context_gain`. The states are fp64 sums and sums of squares, added over devices.

    Args:
        length: Tokens L in a segment.
        window: Number of keys that a query sees with the window.
    """

    segments: Tensor
    sums: Tensor
    squares: Tensor

    def __init__(self, length: int, window: int) -> None:
        super().__init__()
        self.length, self.window = length, window
        self.width = max(1, length // BINS)
        bins = -(-length // self.width)
        self.add_state("segments", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        for name in ("sums", "squares"):  # rows: full, gain
            self.add_state(name, torch.zeros(2, bins, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, full: Tensor, windowed: Tensor) -> None:
        """Add the losses of whole segments, (…, L) fp32 or fp64 in nats, the same targets in both."""
        assert full.shape == windowed.shape
        assert full.shape[-1] == self.length
        losses = torch.stack([full, windowed - full]).double().reshape(2, -1, self.length)  # (2, S, L)
        means = torch.stack([part.mean(-1) for part in losses.split(self.width, -1)], -1)  # (2, S, bins)
        self.sums += means.sum(1)
        self.squares += means.square().sum(1)
        self.segments += means.shape[1]

    def compute(self) -> list[dict[str, Any]]:
        """The rows of the table, one for each bin of positions.

        A row has the first position of the bin, the length, the window, the number of segments, the mean loss with full
        attention and the mean gain, and their standard errors, which are nan with one segment.
        """
        n = int(self.segments)
        means = self.sums / n  # (2, bins)
        errors = ((self.squares / n - means.square()).clamp(min=0) / (n - 1)).sqrt()
        names = ("loss", "gain", "loss_error", "gain_error")
        return [
            {"first": i * self.width, "length": self.length, "window": self.window, "segments": n}
            | dict(zip(names, values, strict=True))
            for i, values in enumerate(torch.cat([means, errors]).T.tolist())
        ]
