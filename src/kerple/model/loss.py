"""The loss of each target, computed in chunks, so that not all logits of a long segment are in memory at once."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from kerple.positions.products import precise


@dataclass(frozen=True)
class ChunkSizes:
    """Sizes of the chunks of logits.

    Args:
        logits: Number of logits per chunk.
        stored: Largest number of logits stored for the backward pass. More logits are computed again.
        rows: Smallest number of rows per chunk, because products of few rows with a large matrix are slow.
    """

    logits: int
    stored: int
    rows: int = 256

    @classmethod
    def of_device(cls, device: torch.device) -> "ChunkSizes":
        """Return the sizes for a device.

        On a CPU, chunks of 8 MiB of fp32 logits stay in the cache. At the size of the demo this takes half the time of
        a single chunk. On a GPU, up to 2 GiB of bf16 logits are stored, because computing them again takes a seventh of
        the operations of a step. Larger numbers of logits have chunks of 2²⁸, to limit the number of kernel launches.
        """
        return cls(2**21, 2**26) if device.type == "cpu" else cls(2**28, 2**30)


RowLosses = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]


def target_losses(
    head: nn.Linear,
    features: Tensor,
    targets: Tensor,
    losses_of_rows: RowLosses | None = None,
    sizes: ChunkSizes | None = None,
    cap: float | None = None,
) -> Tensor:
    """Return the negative log-likelihood of each target, in nats.

    The log-softmax is computed in fp32 or better, also under autocast. Logits are computed chunk by chunk. If there are
    too many to store for the backward pass, each chunk is computed again.
    `torch.nn.functional.linear_cross_entropy` of torch 2.13 is slower on a CPU (1.4 times), and returns a bf16 loss for
    bf16 input.

    Args:
        head: Linear layer from D to the vocabulary V, without bias.
        features: (N, D).
        targets: (N,) int64, below V.
        losses_of_rows: `row_losses`, or a compiled version of it.
        sizes: Sizes of the chunks; None for the default of the device.
        cap: Cap of the logits, see `cap_logits`.

    Returns:
        (N,) fp32, or fp64 for fp64 features.
    """
    sizes, losses_of_rows = sizes or ChunkSizes.of_device(features.device), losses_of_rows or row_losses
    logits, training = len(targets) * head.out_features, torch.is_grad_enabled()
    recompute = training and logits > sizes.stored
    # if all logits are stored, chunks save no memory; on a GPU one chunk casts the weight only once
    logits_per_chunk = logits if training and not recompute and features.is_cuda else sizes.logits
    # chunks of nearly equal size, so that a compiled loss has one graph
    chunks = max(1, math.ceil(len(targets) / max(sizes.rows, logits_per_chunk // head.out_features)))
    losses_of = partial(checkpoint, losses_of_rows, use_reentrant=False) if recompute else losses_of_rows
    pairs = zip(features.chunk(chunks), targets.chunk(chunks), strict=True)
    return torch.cat([losses_of(x, head.weight, y, cap) for x, y in pairs])


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """Return cap · tanh(logits / cap), or the logits unchanged without a cap."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def row_losses(features: Tensor, weight: Tensor, targets: Tensor, cap: float | None = None) -> Tensor:
    """Return the losses (N,) of one chunk, from features (N, D), the head's weight (V, D) and targets (N,)."""
    logits = cap_logits(precise(F.linear(features, weight)), cap)  # (N, V)
    if torch.compiler.is_compiling() or logits.device.type != "cpu":
        return F.cross_entropy(logits, targets, reduction="none")
    return CrossEntropyInPlace.apply(logits, targets)


class CrossEntropyInPlace(torch.autograd.Function):
    """`torch.nn.functional.cross_entropy` that overwrites the logits.

    The memory of the logits (N, V) is reused for the log-probabilities, and then for the gradient. On a CPU this takes
    0.65 times as long as `cross_entropy`, which allocates three tensors of this size.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        log_probabilities = torch.log_softmax(logits, -1, out=logits)
        ctx.save_for_backward(log_probabilities, targets)
        return -log_probabilities.gather(1, targets[:, None]).squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        log_probabilities, targets = ctx.saved_tensors
        logit_gradient = log_probabilities.exp_()  # (softmax - onehot(target)) · gradient of the loss
        logit_gradient[torch.arange(len(targets), device=targets.device), targets] -= 1
        return logit_gradient.mul_(gradient[:, None]), None
