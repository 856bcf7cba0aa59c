"""`TokenLoss`: sums of losses and counts of targets, from which perplexities are computed."""

import math

import torch
from torch import Tensor
from torchmetrics import Metric


class TokenLoss(Metric):
    """Sums the negative log-likelihood of targets, their number and their bytes of text, in groups.

    A group is a block of text, so that confidence intervals can be over blocks, or a position in the segment. The
    states are fp64 sums and int64 counts, which are added over devices. A perplexity is computed once from the sums,
    and is never a mean of perplexities.

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
            losses: Losses of any shape that all belong to ``group``; or (…, G), a column per group, if it is None.
            group: Number of the group, 0..G-1, or None.
            bytes: Number of bytes of text of each target, int64, shaped as the losses. Only `bits_per_byte` needs it.
        """
        assert losses.dtype in (torch.float32, torch.float64), f"losses have dtype {losses.dtype}"
        values = losses.detach().double()
        # sums are deterministic on CUDA, index_add is not
        if group is not None:
            self.nll[group] += values.sum()
            self.targets[group] += values.numel()
            self.bytes[group] += 0 if bytes is None else bytes.sum()
            return
        assert values.shape[-1] == len(self.nll), "losses need a column for each group"
        rows = values.reshape(-1, len(self.nll))  # (n, G)
        self.nll += rows.sum(0)
        self.targets += len(rows)
        self.bytes += 0 if bytes is None else bytes.reshape(rows.shape).sum(0)

    def compute(self) -> Tensor:
        """Perplexity over all groups and devices; () fp64, NaN without targets."""
        return self.perplexity()

    def perplexity(self) -> Tensor:
        """Perplexity of all targets of this device's state; () fp64."""
        return (self.nll.sum() / self.targets.sum()).exp()

    def bits_per_byte(self) -> Tensor:
        """Bits of loss per byte of the targets' text; () fp64. Unlike perplexity, comparable between tokenizers."""
        return self.nll.sum() / self.bytes.sum() / math.log(2)  # in this order the result is fp64
