"""Sums over processes: `TokenLoss` of losses, `ContextGain` of the gain from context by position."""

import math
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

BINS = 64  # bins of positions of a context gain


class TokenLoss(Metric):
    """Sums the negative log-likelihoods of targets, their number, and the bytes of their text, by group.

    A group is a block of text, or a position in the segment. The states are fp64 sums and int64 counts, which are added
    over devices. A perplexity is computed from the total of the sums, and is never a mean of perplexities.

    Args:
        groups: Number of groups G.
    """

    nll: Tensor
    targets: Tensor
    bytes: Tensor

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.add_state("nll", torch.zeros(groups, dtype=torch.float64), dist_reduce_fx="sum")
        for name in ("targets", "bytes"):
            self.add_state(name, torch.zeros(groups, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, losses: Tensor, group: int | None = None, bytes: Tensor | None = None) -> None:
        """Add losses in nats, fp32 or fp64.

        Args:
            losses: Losses of any shape that all belong to ``group``. If it is None, (…, G): a column for each group.
            group: Number of the group, 0..G-1, or None.
            bytes: Number of bytes of text of each target, int64, of the losses' shape. Only `bits_per_byte` needs it.
        """
        assert losses.dtype in (torch.float32, torch.float64), f"losses have dtype {losses.dtype}"
        assert group is not None or losses.shape[-1] == len(self.nll), "expected a column of losses for each group"
        groups = slice(None) if group is None else slice(group, group + 1)
        rows = losses.detach().double().reshape(-1, len(self.nll[groups]))  # (n, G) or (n, 1)
        # on CUDA, sums are deterministic and index_add is not
        self.nll[groups] += rows.sum(0)
        self.targets[groups] += len(rows)
        self.bytes[groups] += 0 if bytes is None else bytes.reshape(rows.shape).sum(0)

    def compute(self) -> Tensor:
        """Perplexity of all groups and devices; () fp64, NaN without targets."""
        return self.perplexity()

    def perplexity(self) -> Tensor:
        """Perplexity of all targets in the state of this device; () fp64."""
        return (self.nll.sum() / self.targets.sum()).exp()

    def bits_per_byte(self) -> Tensor:
        """Bits of loss per byte of text, () fp64. Unlike perplexity, they can be compared between tokenizers."""
        return self.nll.sum() / self.bytes.sum() / math.log(2)  # in this order the result is fp64


class ContextGain(Metric):
    """The loss with full attention, and the gain (loss with a window - full loss), in nats per target by position.

    Positions are in bins. Each segment contributes one mean to each bin, and the standard error is over segments,
    because the targets inside a segment depend on each other. Segments of one document depend on each other a little,
    see `kerple.compare.context_gain`. The states are fp64 sums and sums of squares, which are added over devices.

    Args:
        length: Number of tokens L in a segment.
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
        """Add the losses of the same targets of whole segments, (…, L) fp32 or fp64 in nats."""
        assert full.shape == windowed.shape
        assert full.shape[-1] == self.length
        losses = torch.stack([full, windowed - full]).double().reshape(2, -1, self.length)  # (2, S, L)
        means = torch.stack([part.mean(-1) for part in losses.split(self.width, -1)], -1)  # (2, S, bins)
        self.sums += means.sum(1)
        self.squares += means.square().sum(1)
        self.segments += means.shape[1]

    def compute(self) -> list[dict[str, Any]]:
        """The rows of the table, one for each bin.

        A row has the first position of the bin, the length, the window, the number of segments, the mean full loss, the
        mean gain, and their standard errors, which are NaN with one segment.
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
