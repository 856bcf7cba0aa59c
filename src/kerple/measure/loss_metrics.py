"""`TokenLoss`: sums of losses by block or position. `ContextGain`: the gain from context by position."""

import math
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from kerple.base.errors import require
from kerple.measure.results_table import Row

BINS = 64  # smallest number of bins of a context gain; if a segment has fewer positions, each position is a bin


class TokenLoss(Metric):
    """Sums of the negative log-likelihoods of targets, by group. A group is a block of text or a position.

    A perplexity is computed from the total of the sums, and is never a mean of perplexities.

    Args:
        groups: Number of groups G.

    Attributes:
        nll: Sum of the losses of each group in nats, (G,) fp64.
        targets: Number of targets of each group, (G,) int64.
        text_bytes: Number of bytes of the text of these targets, (G,) int64; 0 if they are not given.
    """

    nll: Tensor
    targets: Tensor
    text_bytes: Tensor

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.add_state("nll", torch.zeros(groups, dtype=torch.float64), dist_reduce_fx="sum")
        for name in ("targets", "text_bytes"):
            self.add_state(name, torch.zeros(groups, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, losses: Tensor, group: int | None = None, text_bytes: Tensor | None = None) -> None:
        """Add losses in nats, fp32 or fp64.

        Args:
            losses: The losses, of any shape.
            group: Index of the group to which all these losses belong, 0..G-1. If it is None, successive losses belong
                to the groups 0..G-1 in turn, such as the G positions of successive segments.
            text_bytes: Number of bytes of the text of each target, int64, of the losses' shape, for `bits_per_byte`.

        Raises:
            UserError: If a network has computed the losses in another dtype.
        """
        require(losses.dtype in (torch.float32, torch.float64), "losses", losses.dtype, "fp32 or fp64")
        groups = slice(None) if group is None else slice(group, group + 1)
        rows = losses.detach().double().reshape(-1, len(self.nll[groups]))  # (n, G) or (n, 1)
        # on CUDA, sums are deterministic and index_add is not
        self.nll[groups] += rows.sum(0)
        self.targets[groups] += len(rows)
        self.text_bytes[groups] += 0 if text_bytes is None else text_bytes.reshape(rows.shape).sum(0)

    def perplexity(self) -> Tensor:
        """Return the perplexity of the targets in the sums of this device, () fp64; NaN without targets."""
        return (self.nll.sum() / self.targets.sum()).exp()

    compute = perplexity  # in each instance, torchmetrics wraps `compute` to return the perplexity over all devices

    def bits_per_byte(self) -> Tensor:
        """Return the bits of loss per byte of text, () fp64, which can be compared between tokenizers."""
        return self.nll.sum() / self.text_bytes.sum() / math.log(2)  # text_bytes.sum() * math.log(2) would be fp32

    def rows(self, protocol: str, length: int, by_position: bool = False) -> list[Row]:
        """Return a row of the results for each group with targets: a position if ``by_position``, else a block."""
        return [
            Row("ppl", protocol, length, i if by_position else None, None if by_position else i, nats, targets)
            for i, (nats, targets) in enumerate(zip(self.nll.tolist(), self.targets.tolist(), strict=True))
            if targets
        ]


class ContextGain(Metric):
    """The loss with full attention, and the gain (loss with a window - full loss), in nats per target by position.

    Positions are divided into bins. Each segment contributes one mean to each bin. Standard errors are over segments,
    because the targets inside a segment depend on each other. Segments of one document are not independent either, so
    standard errors may be too small, see `kerple.compare.charts`.

    Args:
        length: Number of targets L in a segment.
        window: Number of keys that a query sees with the window.
        synchronise: Whether the sums of all processes are added.
    """

    segments: Tensor
    sums: Tensor
    squares: Tensor

    def __init__(self, length: int, window: int, synchronise: bool = False) -> None:
        super().__init__(sync_on_compute=synchronise)
        self.length, self.window = length, window
        self.width = max(1, length // BINS)  # positions in a bin; the last bin may have fewer
        bins = -(-length // self.width)
        self.add_state("segments", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        for name in ("sums", "squares"):  # over segments; rows: full loss, gain
            self.add_state(name, torch.zeros(2, bins, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, full: Tensor, windowed: Tensor) -> None:
        """Add losses of the targets of successive segments, with full attention and with the window, in nats."""
        losses = torch.stack([full, windowed - full]).double().reshape(2, -1, self.length)  # (2, S, L)
        means = torch.stack([part.mean(-1) for part in losses.split(self.width, -1)], -1)  # (2, S, bins)
        self.sums += means.sum(1)
        self.squares += means.square().sum(1)
        self.segments += means.shape[1]

    def compute(self) -> list[dict[str, Any]]:
        """Return the rows of the table, one for each bin.

        A row has the first position of the bin, the length, the window, the number of segments, the mean full loss, the
        mean gain, and their standard errors. With one segment, the standard errors are NaN.
        """
        n = int(self.segments)
        means = self.sums / n  # (2, bins)
        errors = ((self.squares / n - means.square()).clamp(min=0) / (n - 1)).sqrt()
        return [
            {"first": i * self.width, "length": self.length, "window": self.window, "segments": n}
            | dict(zip(("loss", "gain", "loss_error", "gain_error"), values, strict=True))
            for i, values in enumerate(torch.cat([means, errors]).T.tolist())
        ]
