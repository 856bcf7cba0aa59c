"""How far back the last position's loss looks: its gradient by distance, and the smallest window that is enough."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from kerple.evaluation.instrument import uncompiled
from kerple.model import Transformer


def gradient_by_distance(network: Transformer, tokens: Tensor) -> Tensor:
    """Share of each input in the gradient of the last position's loss (Chi et al. 2023, arXiv 2212.10356, section 3).

    ``s_d = ‖∂ loss of the last target / ∂ embedding of the input at distance d‖₂``, divided by its sum over d.

    Args:
        network: The model, in eval mode. Runs in the precision of its weights; autocast is switched off.
        tokens: (B, L+1) int64.

    Returns:
        (B, L) fp64, entry d is the share of the input d tokens before the last one; rows sum to 1.
    """
    embedded: list[Tensor] = []

    def leaf(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[0]

    hook = network.embedding.register_forward_hook(leaf)
    try:
        # inference tensors cannot be saved for a backward pass: copy them outside of inference mode
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
    """Smallest distance d such that inputs 0..d hold ``part`` of the shares (L,)."""
    reached = shares.cumsum(0) >= part * (1 - 1e-12)
    return int(reached.int().argmax()) if bool(reached.any()) else len(shares) - 1


def smallest_sufficient(perplexities: Mapping[int, float], full: float, tolerance: float = 0.01) -> int | None:
    """Smallest window from which on every window's perplexity is within ``tolerance`` of the unrestricted one.

    A window that is good by chance below a worse, larger one does not count. None if even the largest is not enough.
    """
    enough = None
    for window in sorted(perplexities, reverse=True):
        if not perplexities[window] <= full * (1 + tolerance):
            break
        enough = window
    return enough
