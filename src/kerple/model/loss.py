"""Loss of each target, computed in chunks of logits.

Evaluation, and training with many logits, do not keep all logits in memory. N is the number of targets, D the width of
the network, and V the number of token ids.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kerple.base.bf16 import linear
from kerple.base.errors import require
from kerple.positions.fp32_matmul import precise


@dataclass(frozen=True)
class ChunkSizes:
    """Sizes of the chunks of logits. Each target has V logits, one per token id.

    Args:
        logits: Approximate number of logits per chunk.
        stored: Largest number of logits that are stored for the backward pass. If there are more, none is stored, and
            the backward pass computes each chunk again.
        rows: Smallest number of targets per chunk, because products of few rows with a large matrix are slow.
    """

    logits: int
    stored: int
    rows: int = 256

    @classmethod
    def of_device(cls, device: torch.device) -> "ChunkSizes":
        """Return the default sizes for a device.

        On a CPU, chunks of 8 MiB of fp32 logits stay in the processor's cache. For the network of ``make demo``, all
        chunks together take half the time of one chunk with all logits. On a GPU, up to 2 GiB of bf16 logits are
        stored. Computing them again would add 10% to the operations of a step with configs/paper.yaml. If there are
        more, chunks have 2²⁸ logits, which limits the number of kernel launches.
        """
        return cls(2**21, 2**26) if device.type == "cpu" else cls(2**28, 2**30)


RowLosses = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """Return cap · tanh(logits / cap), fp32 or fp64, or the logits unchanged without a cap."""
    return logits if cap is None else cap * torch.tanh(precise(logits) / cap)


def row_losses(features: Tensor, weight: Tensor, targets: Tensor, cap: float | None = None) -> Tensor:
    """Return the losses (N,) of the targets (N,) of one chunk.

    Args:
        features: Inputs of the head, (N, D).
        weight: Weight of the head, (V, D).
        targets: Token ids (N,) int64.
        cap: Cap of the logits; None for no cap.
    """
    return logit_losses(cap_logits(precise(linear(features, weight)), cap), targets)


def target_losses(
    head: nn.Linear,
    features: Tensor,
    targets: Tensor,
    losses_of_rows: RowLosses = row_losses,
    sizes: ChunkSizes | None = None,
    cap: float | None = None,
) -> Tensor:
    """Return the negative log-likelihood of each target, in nats.

    The log-softmax is computed in fp32 (fp64 for fp64 features), also under autocast. Without gradients, or with more
    than ``sizes.stored`` logits, only one chunk of logits is in memory at a time. This function is used instead of
    `torch.nn.functional.linear_cross_entropy`, which takes 1.4 times as long on a CPU in torch 2.13, and returns a bf16
    loss for bf16 input.

    Args:
        head: Linear layer from D features to V logits, without bias.
        features: Inputs of the head, (N, D).
        targets: Token ids (N,) int64, below V.
        losses_of_rows: `row_losses`, or a compiled version of it.
        sizes: Sizes of the chunks; None for the default of the device.
        cap: Cap of the logits, see `cap_logits`; None for no cap.

    Returns:
        Tensor (N,) fp32, or fp64 for fp64 features.
    """
    sizes = sizes or ChunkSizes.of_device(features.device)
    logits = len(targets) * head.out_features
    training = torch.is_grad_enabled()
    recompute = training and logits > sizes.stored
    # if all logits are stored, chunks save no memory; a single chunk on a GPU casts the weight only once
    logits_per_chunk = logits if training and not recompute and features.is_cuda else sizes.logits
    # `Tensor.chunk` makes chunks of nearly equal size, so that a compiled loss needs few graphs
    chunks = max(1, math.ceil(len(targets) / max(sizes.rows, logits_per_chunk // head.out_features)))
    losses_of = partial(checkpoint, losses_of_rows, use_reentrant=False) if recompute else losses_of_rows
    pairs = zip(features.chunk(chunks), targets.chunk(chunks), strict=True)
    return torch.cat([losses_of(x, head.weight, y, cap) for x, y in pairs])


def logit_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the losses (N,) of the targets (N,) from logits (N, V), which may be overwritten."""
    if torch.compiler.is_compiling() or logits.device.type != "cpu":
        return F.cross_entropy(logits, targets, reduction="none")
    return CrossEntropyInPlace.apply(logits, targets)


class CrossEntropyInPlace(torch.autograd.Function):
    """Cross entropy of each target, computed in place.

    The log-probabilities overwrite the logits (N, V), and the gradient overwrites the log-probabilities. On a CPU this
    takes 0.65 times as long as `torch.nn.functional.cross_entropy`, which allocates three tensors of this size.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        log_probabilities = torch.log_softmax(logits, -1, out=logits)
        ctx.save_for_backward(log_probabilities, targets)
        return -log_probabilities.gather(1, targets[:, None]).squeeze(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # `once_differentiable` raises no error if autograd.grad differentiates a gradient
        advice = "False: losses have no second derivatives; compute them from logits by torch's cross_entropy"
        require(not torch.is_grad_enabled(), "create_graph", True, advice)
        log_probabilities, targets = ctx.saved_tensors
        # the gradient of a row of logits is (softmax - onehot(target)) · gradient of the loss
        logit_gradient = log_probabilities.exp_()
        logit_gradient[torch.arange(len(targets), device=targets.device), targets] -= 1
        return logit_gradient.mul_(gradient[:, None]), None
