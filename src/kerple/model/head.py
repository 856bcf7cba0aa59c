"""The loss of every target without ever holding the logits of a long segment."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Pieces:
    """How the logits are cut.

    Args:
        chunk: Numbers that are made at once.
        kept: Numbers that may be kept for the backward pass; beyond that they are made again.
    """

    chunk: int
    kept: int

    @classmethod
    def choose(cls, device: torch.device) -> "Pieces":
        """On the CPU 8 MiB of fp32 logits stay in the cache: at the demo's size half the time of one piece.

        On a GPU a chunk costs some launches, whatever its size: 5,336 rows of 50,304 logits, where 41 would be 400
        chunks a step of 32 × 512; and 2 GiB of bf16 logits are kept, as making them again is a seventh of a step.
        """
        return cls(2**21, 2**26) if device.type == "cpu" else cls(2**28, 2**30)


RowLosses = Callable[[Tensor, Tensor, Tensor], Tensor]


def target_losses(
    head: nn.Linear, features: Tensor, targets: Tensor, of_rows: RowLosses | None = None, pieces: Pieces | None = None
) -> Tensor:
    """Negative log-likelihood of each target, in nats.

    The log-softmax is taken in fp32 whatever autocast says. Logits are made chunk by chunk; in training each chunk is
    made again in the backward pass, instead of being kept, where all of them would be too many.
    `torch.nn.functional.linear_cross_entropy` does the same sum in torch 2.13, but took 1.4 times as long here and
    returns a bf16 loss for bf16 input.

    Args:
        head: Linear from D to the vocabulary V, without a bias.
        features: (N, D).
        targets: (N,) int64 below V.
        of_rows: `row_losses`, or the same compiled.
        pieces: What is made at once and what is kept; None for what suits the device.

    Returns:
        (N,) fp32.
    """
    pieces, of_rows = pieces or Pieces.choose(features.device), of_rows or row_losses
    rows = max(1, pieces.chunk // head.out_features)
    again = torch.is_grad_enabled() and len(targets) * head.out_features > pieces.kept
    return torch.cat(
        [
            checkpoint(of_rows, x, head.weight, y, use_reentrant=False) if again else of_rows(x, head.weight, y)
            for x, y in zip(features.split(rows), targets.split(rows), strict=True)
        ]
    )


def row_losses(features: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Losses of one chunk: (N, D), (V, D) and (N,) -> (N,) fp32; compiled, cast, log-softmax and loss are one."""
    return F.cross_entropy(F.linear(features, weight).float(), targets, reduction="none")
