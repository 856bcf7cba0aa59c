"""Gradient of a table of distances on a GPU, by block diagonals: one Triton kernel, no atomics, deterministic.

All tiles with the same (block of queries - block of keys) have the same distances. A program owns one head, one such
diagonal and a share of its tiles: it adds up dS = P ∘ (dP - Δ) over tiles and batch in registers and writes one tile.
The tiles are then summed along their diagonals once. It needs only q, k, v, the log-sum-exp, Δ and the incoming
gradient, so it stands beside any kernel that computes the gradients of q, k, v with the table held constant.

Checked in Triton's interpreter on the CPU (``TRITON_INTERPRET=1``) in fp32 and fp16, as it has no bf16; its speed
on a GPU has not been measured.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64
TILES = 16  # that one program adds up, at least: fewer programs write fewer partial sums


@triton.jit
def diagonal_kernel(
    Q, K, V, G, LSE, DELTA, TABLE, OUT,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, table_h,
    scale, length, window, batch, heads, blocks,
    DIM: tl.constexpr, WIDTH: tl.constexpr, SIDE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Programs (diagonal, head, split); OUT (SPLITS, heads, diagonals, SIDE, SIDE) fp32."""
    diagonal, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.arange(0, SIDE)
    dim = tl.arange(0, WIDTH)
    real = dim[None, :] < DIM
    distance = diagonal * SIDE + row[:, None] - row[None, :]
    seen = (distance >= 0) & (distance < window) & (distance < length)
    bias = tl.load(TABLE + head * table_h + tl.where(seen, distance, 0), mask=seen, other=0.0)  # once per program
    total = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    along = blocks - diagonal  # tiles of this diagonal in one batch element
    for tile in range(split, along * batch, SPLITS):
        b = (tile // along).to(tl.int64)
        n = (tile % along) * SIDE + row  # keys
        m = n + diagonal * SIDE  # queries
        in_q, in_k = (m[:, None] < length) & real, (n[:, None] < length) & real
        q = tl.load(Q + b * q_b + head * q_h + m[:, None] * q_t + dim[None, :], mask=in_q, other=0.0)
        g = tl.load(G + b * g_b + head * g_h + m[:, None] * g_t + dim[None, :], mask=in_q, other=0.0)
        k = tl.load(K + b * k_b + head * k_h + n[:, None] * k_t + dim[None, :], mask=in_k, other=0.0)
        v = tl.load(V + b * v_b + head * v_h + n[:, None] * v_t + dim[None, :], mask=in_k, other=0.0)
        at = (b * heads + head) * length + m
        lse = tl.load(LSE + at, mask=m < length, other=0.0)
        delta = tl.load(DELTA + at, mask=m < length, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale + bias - lse[:, None]
        p = tl.where(seen & (m[:, None] < length), tl.exp(s), 0.0)
        total += p * (tl.dot(g, tl.trans(v), input_precision="ieee") - delta[:, None])
    at = ((split * heads + head).to(tl.int64) * tl.num_programs(0) + diagonal) * SIDE * SIDE
    tl.store(OUT + at + row[:, None] * SIDE + row[None, :], total)


@torch.library.custom_op("kerple::table_gradient", mutates_args=())
def table_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor, out: Tensor, lse: Tensor, window: int | None
) -> Tensor:
    """Gradient of the table alone.

    Args:
        grad: Of the output, (B, H, T, δ).
        q: (B, H, T, δ), like k and v, all of one dtype, bf16, fp16 or fp32; last stride 1.
        table: (H, >= T) fp32.
        out: (B, H, T, δ).
        lse: (B, H, T) fp32, natural logarithm.
        window: Only keys at distance < window were seen.

    Returns:
        Of the shape of ``table``, fp32; memory O(T).
    """
    batch, heads, length, dim = q.shape
    delta = (grad.float() * out.float()).sum(-1).contiguous()  # (B, H, T)
    lse, table = lse.contiguous(), table.contiguous()
    q, k, v, grad = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, grad.to(q.dtype)))
    blocks = triton.cdiv(length, BLOCK)
    window = length if window is None else min(window, length)
    diagonals = min(blocks, triton.cdiv(window + BLOCK - 1, BLOCK))  # further ones see nothing
    splits = max(1, min(8, batch * blocks // TILES))
    tiles = table.new_empty(splits, heads, diagonals, BLOCK, BLOCK)
    diagonal_kernel[(diagonals, heads, splits)](
        q, k, v, grad, lse, delta, table, tiles,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *grad.stride()[:3], table.stride(0),
        dim**-0.5, length, window, batch, heads, blocks,
        DIM=dim, WIDTH=max(16, triton.next_power_of_2(dim)), SIDE=BLOCK, SPLITS=splits,
    )  # fmt: skip
    total, seen = torch.zeros_like(table), min(length, diagonals * BLOCK)
    total[:, :seen] = sum_tiles(tiles.sum(0))[:, :seen]
    return total


@table_gradient.register_fake
def _(grad, q, k, v, table, out, lse, window):
    return torch.empty_like(table)


def sum_tiles(tiles: Tensor) -> Tensor:
    """Sum tiles (H, diagonals, S, S) by distance, entry (r, c) of tile t being at t·S + r - c; (H, diagonals · S).

    With columns reversed and rows at a pitch of 2 S, read at a pitch of 2 S - 1, an anti-diagonal is a column.
    """
    heads, count, side, _ = tiles.shape
    padded = F.pad(tiles.flip(-1), (0, side)).flatten(2)  # (H, t, S · 2S)
    x = padded[..., : side * (2 * side - 1)].unflatten(-1, (side, 2 * side - 1)).sum(2)  # index r + S - 1 - c
    total = x.new_zeros(heads, count + 1, side)
    total[:, 1:] += x[..., side - 1 :]  # distances t·S .. t·S + S - 1
    total[:, :-1, 1:] += x[..., : side - 1]  # t·S - (S - 1) .. t·S - 1; none of them is below 0 for tile 0
    return total.flatten(1)[:, side:]
