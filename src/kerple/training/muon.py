"""`Muon`: an optimiser that updates matrices by their orthogonalised momentum, and other parameters as AdamW does."""

import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kerple.base.temporary_value import temporary_value

MOMENTUM = 0.95
COEFFICIENTS, STEPS = (3.4445, -4.7750, 2.0315), 5  # of the quintic Newton-Schulz iteration


class Muon(torch.optim.AdamW):
    """AdamW, with Muon for the parameter groups that have the key ``"muon"``.

    The parameters of such a group are matrices. The value of ``"muon"`` is a list with the number of rows of each part
    of a matrix, for example of its queries, keys and values. Each part is updated as a separate matrix. With an empty
    list, the matrices are not split.

    Muon and AdamW have the same options for learning rate and weight decay. An update by Muon is scaled to the usual
    root mean square of an update by AdamW, 0.2 (Liu et al. 2025, arXiv 2502.16982, section 2.2). `torch.optim.Muon`
    updates by the same rule, but accepts only matrices and iterates in bf16, which many CPUs emulate. This class
    iterates in fp32.

    Args:
        groups: Parameter groups. Those without ``"muon"`` are updated by AdamW.
        **options: Options of AdamW.
    """

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        super().__init__([{"muon": None, **group} for group in groups], **options)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["muon"] is not None:
                self._update_matrices(group)
        others = [group for group in self.param_groups if group["muon"] is None]
        with temporary_value(self, "param_groups", others):
            # `super().step()` would call our hooks again, because torch wraps AdamW.step when an AdamW is built
            inspect.unwrap(torch.optim.AdamW.step, stop=lambda step: not getattr(step, "hooked", False))(self)
        return loss

    def _update_matrices(self, group: dict[str, Any]) -> None:
        # parts and momenta are stacked by shape, because the iteration is faster on many matrices at once
        parts_by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for p in group["params"]:
            if p.grad is not None:
                p.mul_(1 - group["lr"] * group["weight_decay"])
                state = self.state[p]
                if not state:  # AdamW's `load_state_dict` expects a step
                    state.update(step=torch.zeros(()), momentum=torch.zeros_like(p))
                state["step"] += 1
                state["momentum"].lerp_(p.grad, 1 - MOMENTUM)  # exponential moving average of the gradients
                nesterov = p.grad.lerp(state["momentum"], MOMENTUM)
                rows = group["muon"] or [len(p)]
                for part, momentum in zip(p.split(rows), nesterov.split(rows), strict=True):
                    parts_by_shape[part.shape].append((part, momentum))
        for shape, parts in parts_by_shape.items():
            directions = orthogonalise(torch.stack([momentum for _, momentum in parts]))  # (parts, rows, columns)
            scale = 0.2 * max(shape) ** 0.5  # the root mean square of an orthogonal matrix is max(shape) ** -0.5
            for (part, _), direction in zip(parts, directions, strict=True):
                part.add_(direction, alpha=-group["lr"] * scale)


def orthogonalise(matrices: Tensor) -> Tensor:
    """Approximate U·Vᵀ for each matrix by a Newton-Schulz iteration, where U·S·Vᵀ is its singular value decomposition.

    The singular values of the result are 0.7 to 1.2, except for values that were much smaller than the largest.
    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon.

    Args:
        matrices: Matrices (n, rows, columns).

    Returns:
        The orthogonalised matrices (n, rows, columns) fp32.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if tall else matrices).float()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
