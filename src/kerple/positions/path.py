"""`PaTH`: products of Householder-like transformations, one for each token between query and key."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kerple.positions.base import Position, Shape
from kerple.positions.fp32_matmul import precise, product
from kerple.positions.token_positions import QueryKeyBlock, TokenPositions

KEYS_AT_ONCE = 64  # number of keys whose transformations are multiplied into one matrix


class PaTH(Position):
    """Score ``k_nᵀ · (H_{n+1} · H_{n+2} · … · H_m) · q_m / √δ`` with a matrix ``H_t = I - β_t w_t w_tᵀ`` for each token
    t (Yang et al. 2025, arXiv 2505.16381, section 3).

    In each head, w_t is a normalised low-rank projection of the hidden state of token t, and β_t in (0, 2) its gate.
    H_t keeps the component along w_t (β_t near 0), removes it (near 1) or reflects it (near 2). Yang et al. also
    convolve the projection over the last three tokens. The convolution is omitted here, because it would read up to two
    tokens outside a window.

    Parameters: `2 * D * rank + H * D + H`, one set per layer by default.
    Cost: explicit scores (see `Position`), and additional matrix products for each block of 64 keys (section 3.3).

    Args:
        shape: Sizes of the model.
        rank: Rank of the projection, for all heads together.

    Raises:
        UserError: If ``rank`` is not positive.
    """

    shift_invariant = True
    per_layer = True

    def __init__(self, shape: Shape, rank: int = 32) -> None:
        super().__init__()
        self.require(rank >= 1, "rank", rank, "a positive number, such as 32")
        self.heads = shape.heads
        self.down = nn.Linear(shape.dim, rank, bias=False, dtype=torch.float32)
        self.up = nn.Linear(rank, shape.heads * shape.head_dim, bias=False, dtype=torch.float32)
        self.gate = nn.Linear(shape.dim, shape.heads, dtype=torch.float32)

    def token_state(self, x: Tensor, positions: TokenPositions, past: Tensor | None) -> Tensor:
        w = product(product(x, self.down.weight.T), self.up.weight.T).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        beta = 2 * torch.sigmoid(product(x, self.gate.weight.T) + self.gate.bias).mT[..., None]  # (B, H, T, 1)
        return torch.cat([F.normalize(w, dim=-1), beta], -1)  # (B, H, T, δ + 1)

    def modify_scores(self, s: Tensor, q: Tensor, k: Tensor, block: QueryKeyBlock) -> Tensor:
        assert block.state is not None, "PaTH's scores need the state of the keys"
        q, k, dim = precise(q), precise(k), q.shape[-1]
        w, beta = block.state[..., :dim], block.state[..., dim : dim + 1]  # (B, H, Tk, δ), (B, H, Tk, 1)
        first = k.shape[2] - q.shape[2]  # row of the first query among the keys
        new_w, new_k = w[:, :, first:], k[:, :, first:]
        gates = _combined_gates(new_w, beta[:, :, first:])  # (B, H, Tq, Tq)
        coefficients = product(product(q, new_w.mT).tril(), gates)
        scores = [product(q, new_k.mT) - product(coefficients, product(new_w, new_k.mT).tril(-1))]
        q = q - product(coefficients, new_w)  # now H_first · … · H_m · q_m for each query m
        for stop in range(first, 0, -KEYS_AT_ONCE):
            keys = slice(max(0, stop - KEYS_AT_ONCE), stop)
            w_j, k_j = w[:, :, keys], k[:, :, keys]
            gates = _combined_gates(w_j, beta[:, :, keys])  # (B, H, keys, keys)
            # k_nᵀ · H_{n+1} · … · H_{stop-1} for each key n of the block
            transformed_k = k_j - product(product(product(k_j, w_j.mT).triu(1), gates.mT), w_j)
            scores.append(product(q, transformed_k.mT))  # (B, H, Tq, keys)
            q = q - product(product(product(q, w_j.mT), gates), w_j)
        return torch.cat(scores[::-1], -1) * dim**-0.5


def _combined_gates(w: Tensor, beta: Tensor) -> Tensor:
    """Return the matrix ``T = (I + L)⁻¹ · diag(β)`` (…, n, n), where L is the strictly lower part of ``diag(β)·w·wᵀ``.

    For tokens 1 to n, ``I - wᵀ·T·w = H_n · … · H_1`` is the transpose of the product in the score of `PaTH`.

    Args:
        w: Directions w_t as rows, (…, n, δ).
        beta: Gates β_t, (…, n, 1).
    """
    return _Inverse.apply(beta * product(w, w.mT).tril(-1)) * beta.mT


class _Inverse(torch.autograd.Function):
    """(I + L)⁻¹ of a strictly lower triangular matrix L. Torch's own backward pass might multiply in TF32."""

    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
        inverse = torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -product(inverse.mT, product(grad, inverse.mT))
