"""Gradient of a table of biases by distance, (H, T), on a GPU: one deterministic Triton kernel over block diagonals.

All tiles with the same (block of queries - block of keys) have the same distances. A program owns one head, one such
diagonal and a share of its tiles: it adds up dS = P ∘ (dP - Δ) over tiles and batch in registers and writes one tile.
The tiles are then summed along their diagonals once, without atomic additions. It needs only q, k, v, the log-sum-exp,
Δ and the incoming gradient, so it stands beside any kernel that computes the gradients of q, k, v with the table held
constant.

Checked in Triton's interpreter on the CPU (``TRITON_INTERPRET=1``) in fp32 and fp16, as it has no bf16, and compiled
for the chips `tiling` knows; its speed on a GPU has not been measured.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

TILES = 16  # tiles that one program adds up at least: fewer programs write fewer partial sums
PROGRAMS = 1024  # enough for any chip; the same on each, so that sums have one order everywhere


@dataclass(frozen=True)
class Tiling:
    """Side of a tile, and warps and stages of a Triton program; fixed, as autotuning could change the order of sums."""

    side: int
    warps: int
    stages: int


def tiling(capability: tuple[int, int], dim: int) -> Tiling:
    """Return the largest tiling that spills no register and fits the chip's shared memory.

    ``dim`` is the wider of δ and δv.

    From ahead-of-time compilations (`benchmarks.gpu.kernels`), not from timings.
    """
    if dim <= 64:
        return Tiling(64, 4, 3)
    return Tiling(64, 8, 1) if capability[0] == 9 else Tiling(32, 4, 2)


@triton.jit
def diagonal_kernel(
    Q, K, V, G, LSE, DELTA, TABLE, OUT,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, table_h,
    scale, length, window, batch, heads, blocks,
    DIM: tl.constexpr, V_DIM: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    GROUP: tl.constexpr, SIDE: tl.constexpr, SPLITS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Programs (diagonal, head, split); OUT (SPLITS, heads, diagonals, SIDE, SIDE) fp32. GROUP heads share a key.

    Masks that are true by a constant, such as EVEN (the length fills its tiles), are compiled away.
    """
    diagonal, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.arange(0, SIDE)
    dim, v_dim = tl.arange(0, WIDTH), tl.arange(0, V_WIDTH)
    real, v_real = (dim[None, :] < DIM) | (DIM == WIDTH), (v_dim[None, :] < V_DIM) | (V_DIM == V_WIDTH)
    distance = diagonal * SIDE + row[:, None] - row[None, :]
    seen = (distance >= 0) & (distance < window) & (distance < length)
    # once per program; what is not seen has weight exp(-inf)
    bias = tl.load(TABLE + head * table_h + tl.where(seen, distance, 0), mask=seen, other=float("-inf"))
    log2e = 1.4426950408889634  # the chip's exponential is that of base 2
    bias, scale = bias * log2e, scale * log2e
    total = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    along = blocks - diagonal  # tiles of this diagonal in one batch element
    for tile in range(split, along * batch, SPLITS):
        b = (tile // along).to(tl.int64)
        n = (tile % along) * SIDE + row  # keys
        m = n + diagonal * SIDE  # queries
        inside = (m < length) | EVEN
        in_q, in_k = inside[:, None], (n[:, None] < length) | EVEN
        q = tl.load(Q + b * q_b + head * q_h + m[:, None] * q_t + dim[None, :], mask=in_q & real, other=0.0)
        g = tl.load(G + b * g_b + head * g_h + m[:, None] * g_t + v_dim[None, :], mask=in_q & v_real, other=0.0)
        shared = head // GROUP
        k = tl.load(K + b * k_b + shared * k_h + n[:, None] * k_t + dim[None, :], mask=in_k & real, other=0.0)
        v = tl.load(V + b * v_b + shared * v_h + n[:, None] * v_t + v_dim[None, :], mask=in_k & v_real, other=0.0)
        at = (b * heads + head) * length + m
        lse = tl.load(LSE + at, mask=inside, other=float("inf"))  # past the end, weights are 0 too
        delta = tl.load(DELTA + at, mask=inside, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale + bias - (lse * log2e)[:, None]
        total += tl.exp2(s) * (tl.dot(g, tl.trans(v), input_precision="ieee") - delta[:, None])
    at = ((split * heads + head).to(tl.int64) * tl.num_programs(0) + diagonal) * SIDE * SIDE
    tl.store(OUT + at + row[:, None] * SIDE + row[None, :], total)


def shares(programs: int, tiles: int) -> int:
    """Return the number of programs that share a diagonal of ``tiles`` tiles.

    ``programs`` is their number if each diagonal had one. Each program writes a partial sum of its own: at 1 × 16,384
    tokens, those of one program for each diagonal have 48 MiB already.
    """
    return max(1, min(8, triton.cdiv(PROGRAMS, programs), tiles // TILES))


def width(dim: int) -> int:
    """Columns of a tile of a head's dimensions: a power of 2 that tensor cores take."""
    return max(16, triton.next_power_of_2(dim))


@torch.library.custom_op("kerple::table_gradient", mutates_args=())
def table_gradient(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lse: Tensor,
    delta: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """Gradient of the table alone.

    Args:
        grad: Of the output, (B, H, T, δv).
        q: (B, H, T, δ), of one dtype with k and v: bf16 or fp16, and fp32 in the interpreter (compiled, it spills).
        k: (B, G, T, δ), G a divisor of H.
        v: (B, G, T, δv).
        table: (H, >= T) fp32.
        lse: (B, H, T) fp32, natural logarithm.
        delta: (B, H, T) fp32: the sum over δv of grad ∘ output, less the gradient of ``lse`` if it has one.
        scale: Of q·k.
        window: Only keys at distance < window were seen.

    Returns:
        Of the shape of ``table``, contiguous, fp32; memory O(T).
    """
    (batch, heads, length, dim), v_dim = q.shape, v.shape[3]
    lse, delta, table = lse.contiguous(), delta.contiguous(), table.contiguous()
    q, k, v, grad = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, grad.to(q.dtype)))
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (8, 0)
    cut = tiling(capability, max(dim, v_dim))
    blocks = triton.cdiv(length, cut.side)
    window = length if window is None else min(window, length)
    diagonals = min(blocks, triton.cdiv(window + cut.side - 1, cut.side))  # further ones see nothing
    splits = shares(diagonals * heads, batch * blocks)
    tiles = table.new_empty(splits, heads, diagonals, cut.side, cut.side)
    diagonal_kernel[(diagonals, heads, splits)](
        q, k, v, grad, lse, delta, table, tiles,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *grad.stride()[:3], table.stride(0),
        scale, length, window, batch, heads, blocks,
        DIM=dim, V_DIM=v_dim, WIDTH=width(dim), V_WIDTH=width(v_dim),
        GROUP=heads // k.shape[1], SIDE=cut.side, SPLITS=splits, EVEN=length % cut.side == 0,
        num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    total, seen = torch.zeros_like(table), min(length, diagonals * cut.side)
    total[:, :seen] = sum_tiles(tiles.sum(0))[:, :seen]
    return total


@table_gradient.register_fake
def _(grad, q, k, v, table, lse, delta, scale, window):
    return table.new_empty(table.shape)  # contiguous, whatever the table is


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
