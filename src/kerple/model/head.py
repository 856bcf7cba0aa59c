"""The loss of every target without ever holding the logits of a long segment."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# numbers; 8 MiB of fp32 logits stay in the cache: at the demo's size the loss costs half of what it does in one piece
CHUNK = 2**21
KEPT = 2**26  # numbers; 256 MiB of logits are kept for the backward pass, beyond that they are made again


def target_losses(head: nn.Linear, features: Tensor, targets: Tensor, chunk: int = CHUNK, kept: int = KEPT) -> Tensor:
    """Negative log-likelihood of each target, in nats.

    The log-softmax is taken in fp32 whatever autocast says. Logits are made chunk by chunk; in training each chunk is
    made again in the backward pass, instead of being kept, where all of them would be more than ``kept``.
    `torch.nn.functional.linear_cross_entropy` does the same sum in torch 2.13, but took 1.4 times as long here and
    returns a bf16 loss for bf16 input.

    Args:
        head: Linear from D to the vocabulary V.
        features: (N, D).
        targets: (N,) int64 below V.
        chunk: Number of logits that are made at once.
        kept: Number of logits that may be kept for the backward pass.

    Returns:
        (N,) fp32.
    """
    rows = max(1, chunk // head.out_features)
    again = torch.is_grad_enabled() and len(targets) * head.out_features > kept
    return torch.cat(
        [
            checkpoint(_losses, head, x, y, use_reentrant=False) if again else _losses(head, x, y)
            for x, y in zip(features.split(rows), targets.split(rows), strict=True)
        ]
    )


def _losses(head: nn.Linear, features: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(head(features).float(), targets, reduction="none")
