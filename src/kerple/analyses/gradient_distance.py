"""Measures of how far back a network uses its context: gradients by distance, and the smallest sufficient window.

The callback `ReceptiveField` reports both.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from kerple.analyses.instrument import uncompiled
from kerple.model import Transformer


def gradient_by_distance(network: Transformer, tokens: Tensor) -> Tensor:
    """Share of each input in the gradient of the last position's loss (Chi et al. 2023, arXiv 2212.10356, section 3).

    ``s_d = ‖∂ loss of the last target / ∂ embedding of the input at distance d‖₂``, divided by its sum over d.

    Args:
        network: The model, in evaluation mode. It runs in the precision of its weights, without autocast.
        tokens: (B, L+1) int64.

    Returns:
        (B, L) fp64. Entry d is the share of the input that is d tokens before the last one; rows add up to 1.
    """
    embedded: list[Tensor] = []

    def leaf(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[0]

    hook = network.embedding.register_forward_hook(leaf)
    try:
        # a backward pass cannot use tensors of inference mode, so they are copied outside of it
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            uncompiled(network),
            torch.autocast(tokens.device.type, enabled=False),
        ):
            loss = network.losses(tokens.clone(), last=1).sum()
            (gradient,) = torch.autograd.grad(loss, embedded)  # (B, L, D)
    finally:
        hook.remove()
    norms = gradient.double().norm(dim=-1).flip(1)  # (B, L), entry d at distance d
    return norms / norms.sum(1, keepdim=True)


def distance_covering(shares: Tensor, part: float) -> int:
    """Smallest distance d such that the shares (L,) of distances 0..d add up to ``part``, in 0..1."""
    reached = shares.cumsum(0) >= part * (1 - 1e-12)
    return int(reached.int().argmax()) if bool(reached.any()) else len(shares) - 1


def smallest_sufficient(perplexities: Mapping[int, float], full: float, tolerance: float = 0.01) -> int | None:
    """Smallest window that is sufficient, as are all larger ones, or None if the largest is not.

    Args:
        perplexities: Perplexity with each window.
        full: Perplexity without a window.
        tolerance: A window is sufficient if its perplexity exceeds ``full`` by at most this share.
    """
    enough = None
    for window in sorted(perplexities, reverse=True):
        if not perplexities[window] <= full * (1 + tolerance):
            break
        enough = window
    return enough
