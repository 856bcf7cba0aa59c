"""The loss of every target without ever holding the logits of a long segment."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LOGITS_AT_ONCE = (
    2**25
)  # numbers: 128 MiB of fp32 logits, the demo's whole batch of 8,192 targets × 2,048 entries in one piece


def target_losses(head: nn.Linear, features: Tensor, targets: Tensor, at_once: int = LOGITS_AT_ONCE) -> Tensor:
    """Negative log-likelihood of each target, in nats.

    The log-softmax is taken in fp32 whatever autocast says. More than ``at_once`` logits are made chunk by chunk; in
    training each chunk is made again in the backward pass instead of being kept.

    Args:
        head: Linear from D to the vocabulary V.
        features: (N, D).
        targets: (N,) int64 below V.
        at_once: Number of logits that may exist at once.

    Returns:
        (N,) fp32.
    """
    rows = max(1, at_once // head.out_features)
    if len(targets) <= rows:
        return _losses(head, features, targets)
    recompute = torch.is_grad_enabled()
    return torch.cat(
        [
            checkpoint(_losses, head, x, y, use_reentrant=False) if recompute else _losses(head, x, y)
            for x, y in zip(features.split(rows), targets.split(rows), strict=True)
        ]
    )


def _losses(head: nn.Linear, features: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(head(features).float(), targets, reduction="none")
