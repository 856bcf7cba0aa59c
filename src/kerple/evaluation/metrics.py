"""Sums of loss and counts of targets: the only state a perplexity may be made of."""

import math

import torch
from torch import Tensor
from torchmetrics import Metric


class TokenLoss(Metric):
    """Negative log-likelihood summed by group, how many targets each group has, and how many bytes of text they are.

    A group is whatever the sums have to be kept apart by: a block of text (so that block 7 is the same number on any
    number of devices, and intervals can be bootstrapped over blocks), or a position in the segment. States are fp64
    sums and int64 counts, added over devices; a perplexity is one exp of the one quotient at the end, never a mean of
    means.

    Args:
        groups: Number of groups G.

    Raises:
        ValueError: If there is no group.
    """

    full_state_update = False
    is_differentiable = False
    higher_is_better = False
    nll: Tensor
    targets: Tensor
    bytes: Tensor

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        if groups < 1:
            raise ValueError(f"groups: got {groups}, expected at least one")
        self.add_state("nll", torch.zeros(groups, dtype=torch.float64), dist_reduce_fx="sum")
        for counted in ("targets", "bytes"):
            self.add_state(counted, torch.zeros(groups, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, losses: Tensor, group: int | None = None, bytes: Tensor | None = None) -> None:
        """Add losses in nats, fp32 or fp64.

        Args:
            losses: Any shape if they all belong to ``group``; (…, G) with one column per group if ``group`` is None.
            group: 0..G-1, or None.
            bytes: Bytes of text in each target, int64, shaped as the losses; needed by `bits_per_byte` alone.

        Raises:
            ValueError: If the losses are of lower precision, in which they are wrong already, do not have G columns,
                or are not as many as the bytes.
        """
        if losses.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"losses: got {losses.dtype}, expected float32 or float64; take log-softmax in fp32")
        if bytes is not None and bytes.shape != losses.shape:
            raise ValueError(f"bytes: got {tuple(bytes.shape)}, expected {tuple(losses.shape)}, one for each loss")
        values = losses.detach().double()
        # plain sums rather than index_add: they are deterministic on CUDA
        if group is not None:
            self.nll[group] += values.sum()
            self.targets[group] += values.numel()
            self.bytes[group] += 0 if bytes is None else bytes.sum()
            return
        if values.dim() == 0 or values.shape[-1] != len(self.nll):
            raise ValueError(f"losses: got {tuple(values.shape)}, expected {len(self.nll)} columns, one per group")
        rows = values.reshape(-1, len(self.nll))  # (n, G)
        self.nll += rows.sum(0)
        self.targets += len(rows)
        if bytes is not None:
            self.bytes += bytes.reshape(rows.shape).sum(0)

    def compute(self) -> Tensor:
        """Perplexity over all groups; () fp64, nan where there is no target."""
        return self.perplexity()

    def perplexity(self) -> Tensor:
        """Perplexity of all targets of this device's state; () fp64."""
        return (self.nll.sum() / self.targets.sum()).exp()

    def perplexities(self) -> Tensor:
        """Perplexity of each group of this device's state; (G,) fp64, nan where a group has no target."""
        return (self.nll / self.targets).exp()

    def bits_per_byte(self) -> Tensor:
        """Bits of loss per byte of the targets' text; () fp64. Comparable between tokenizers, unlike perplexity."""
        return self.nll.sum() / self.bytes.sum() / math.log(2)  # fp64 only in this order
