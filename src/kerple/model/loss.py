"""The loss of each target, computed in chunks, so that the logits of a long segment are never in memory at once."""

import math
from collections.abc import Callable
from dataclasses import dataclass
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
        logits: Number of logits that are computed at once.
        stored: Number of logits that may be stored for the backward pass. If there are more, they are computed again.
        rows: Smallest number of rows of a chunk: the product of fewer with a large vocabulary's weights is slow.
    """

    logits: int
    stored: int
    rows: int = 256

    @classmethod
    def of_device(cls, device: torch.device) -> "ChunkSizes":
        """Sizes for a device.

        On the CPU, chunks of 8 MiB of fp32 logits stay in the cache; at the demo's size they take half the time of a
        single chunk. On a GPU, 2 GiB of bf16 logits are stored, because computing them again takes a seventh of a
        step's operations; what is not stored has chunks of 5,336 rows of 50,304 logits, as each costs some launches.
        """
        return cls(2**21, 2**26) if device.type == "cpu" else cls(2**28, 2**30)


RowLosses = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]


def target_losses(
    head: nn.Linear,
    features: Tensor,
    targets: Tensor,
    of_rows: RowLosses | None = None,
    sizes: ChunkSizes | None = None,
    cap: float | None = None,
) -> Tensor:
    """Negative log-likelihood of each target, in nats.

    The log-softmax is computed in fp32 or better, also under autocast. Logits are computed chunk by chunk. If there are
    too many to keep for the backward pass, each chunk is computed again in it.
    `torch.nn.functional.linear_cross_entropy` of torch 2.13 does the same, but took 1.4 times as long on a CPU (timed
    by hand) and returns a bf16 loss for bf16 input.

    Args:
        head: Linear layer from D to the vocabulary V, without bias.
        features: (N, D).
        targets: (N,) int64, below V.
        of_rows: `row_losses`, or a compiled version of it.
        sizes: Sizes of the chunks; None for those that suit the device.
        cap: Cap of the logits, see `capped`.

    Returns:
        (N,) fp32, or fp64 for fp64 features.
    """
    sizes, of_rows = sizes or ChunkSizes.of_device(features.device), of_rows or row_losses
    logits, trains = len(targets) * head.out_features, torch.is_grad_enabled()
    again = trains and logits > sizes.stored
    # what is stored is in memory at once however it is cut: on a GPU one chunk, for which the weight is cast once
    at_once = logits if trains and not again and features.is_cuda else sizes.logits
    # even chunks, for which a compiled loss has one graph
    chunks = max(1, math.ceil(len(targets) / max(sizes.rows, at_once // head.out_features)))
    return torch.cat(
        [
            checkpoint(of_rows, x, head.weight, y, cap, use_reentrant=False)
            if again
            else of_rows(x, head.weight, y, cap)
            for x, y in zip(features.chunk(chunks), targets.chunk(chunks), strict=True)
        ]
    )


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Logits x as cap · tanh(x / cap), or unchanged without a cap."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def row_losses(features: Tensor, weight: Tensor, targets: Tensor, cap: float | None = None) -> Tensor:
    """Losses (N,) of one chunk, from features (N, D), the head's weight (V, D), targets (N,) and the logits' cap."""
    logits = capped(precise(F.linear(features, weight)), cap)  # (N, V)
    if torch.compiler.is_compiling() or logits.device.type != "cpu":
        return F.cross_entropy(logits, targets, reduction="none")
    return CrossEntropyInPlace.apply(logits, targets)


class CrossEntropyInPlace(torch.autograd.Function):
    """`torch.nn.functional.cross_entropy` that overwrites the logits.

    Log-probabilities and later the gradient take the memory of the logits (N, V), which nothing else reads. On a CPU
    this takes 0.65 of the time of `cross_entropy` with its three tensors of that size.
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
        logit_gradient = log_probabilities.exp_()  # softmax - onehot(target), times the gradient of the loss
        logit_gradient[torch.arange(len(targets), device=targets.device), targets] -= 1
        return logit_gradient.mul_(gradient[:, None]), None
