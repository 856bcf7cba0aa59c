"""Angles of positions in fp64, because in fp32 they have an error of 0.004 radians at position 40,000."""

import torch
from torch import Tensor


def exact_dtype(device: torch.device) -> torch.dtype:
    """Return fp64, or fp32 on MPS devices, which have no fp64."""
    return torch.float32 if device.type == "mps" else torch.float64


def frequencies(dim: int, base: float | Tensor, device: torch.device) -> Tensor:
    """Return the frequencies ``base^(-2i/dim)`` in radians per position, i = 0..dim/2-1.

    They are (dim/2,) fp64, or (…, dim/2) fp64 if ``base`` is a tensor (…, 1).
    """
    i = torch.arange(0, dim, 2, dtype=exact_dtype(device), device=device)
    return base ** (-i / dim)


def angles(positions: Tensor, dim: int, base: float) -> Tensor:
    """Return the angles in radians, (…, dim/2) fp64: the products of positions (…) and `frequencies`."""
    radians = frequencies(dim, base, positions.device)  # per position
    return positions.to(radians.dtype)[..., None] * radians
