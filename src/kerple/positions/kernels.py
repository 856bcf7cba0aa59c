"""KERPLE: conditionally positive definite kernels of distance as additive attention biases (Chi et al. 2022, arXiv 2205.09921)."""

import torch
from torch import Tensor, nn

from kerple.positions.base import Position, Shape


class KerpleLog(Position):
    """Logarithmic kernel: ``-r1_h · log(1 + r2_h · d)`` (Chi et al. 2022, section 4).

    Args:
        shape: What the model hands to every strategy. KerpleLog has 2 H parameters, shared by all layers.
        floor: Lower bound of r1 and r2, kept by `constrain_` after each optimiser step. Must be positive.
    """

    shift_invariant = True

    def __init__(self, shape: Shape, floor: float = 0.01) -> None:
        super().__init__()
        if floor <= 0:
            raise ValueError(f"KerpleLog: floor: got {floor}, expected a positive number; the paper's code uses 0.01")
        self.floor = floor
        self.r1 = nn.Parameter(torch.empty(shape.heads).uniform_(floor, 2))
        self.r2 = nn.Parameter(torch.empty(shape.heads).uniform_(floor, 1))

    def bias(self, length: int) -> Tensor:
        # fp32 even in a bf16 model: bf16 merges distances above 256
        r1, r2 = self.r1.float()[:, None], self.r2.float()[:, None]  # (H, 1)
        return -r1 * torch.log1p(r2 * self.distances(length))  # (H, length)

    @torch.no_grad()
    def constrain_(self) -> None:
        self.r1.clamp_(min=self.floor)
        self.r2.clamp_(min=self.floor)
