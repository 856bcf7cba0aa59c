"""Gradient of a table of attention biases by distance, (H, T), on a GPU: a deterministic Triton kernel.

Scores are divided into tiles of queries × keys. The tiles with the same difference of indices, query block minus key
block, are a block diagonal and contain the same distances. For each head and block diagonal, the tiles of all sequences
of the batch are divided among one or more programs. A program sums the gradient of the scores, dS = P ∘ (dP - Δ), of
its tiles in registers, and writes one tile. The formula is that of `kerple.attention.cpu_backward`, where Δ is called
D. The written tiles are then summed along their diagonals, without atomic additions. The kernel reads q, k, v, the
table, the log-sum-exp, Δ and the gradient of the output. It can therefore be combined with any kernel for the gradients
of q, k and v.

The tests run the kernel in Triton's interpreter on the CPU (``TRITON_INTERPRET=1``), in fp32 and fp16, because the
interpreter has no bf16. They also compile it for two kinds of chips, compute capability 8.0 and 9.0.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

TILES = 16  # at most one program per 16 tiles of the longest diagonal, because each program writes a partial sum
PROGRAMS = 1024  # target number of programs, enough for any chip; a constant, because it determines the order of sums


def tiling(capability: tuple[int, int], dim: int) -> tuple[int, int, int]:
    """Return the side of a tile, and the numbers of warps and pipeline stages of a program.

    The tile is the largest one that fits the chip's registers and shared memory in ahead-of-time compilations
    (`benchmarks.gpu.kernels`). Sizes are fixed, because autotuning could change the order of sums.

    Args:
        capability: Compute capability of the chip, such as (9, 0).
        dim: The larger of the head dimensions of keys and values.
    """
    if dim <= 64:
        return 64, 4, 3
    return (64, 8, 1) if capability[0] == 9 else (32, 4, 2)


@triton.jit
def diagonal_kernel(
    Q, K, V, G, LSE, DELTA, TABLE, OUT, FIRST,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, table_h,
    scale, length, window, batch, heads, blocks,
    DIM: tl.constexpr, V_DIM: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    GROUP: tl.constexpr, SIDE: tl.constexpr, SPLITS: tl.constexpr, EVEN: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Write partial sums of dS to OUT, (SPLITS, heads, diagonals, SIDE, SIDE) fp32.

    The grid of programs is (diagonals, heads, SPLITS). G is the gradient of the output, and DELTA is Δ. Arguments such
    as q_b, q_h and q_t are strides of batch, heads and tokens. GROUP query heads share a key head. DIM and V_DIM are
    head dimensions, and WIDTH and V_WIDTH are these dimensions padded to powers of 2. EVEN is true if the length is
    a multiple of SIDE. DOCUMENTS is true if FIRST has the first key that each query sees, (batch, length) int32. Masks
    that are true because of a constant are removed by the compiler.
    """
    diagonal, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.arange(0, SIDE)
    dim, v_dim = tl.arange(0, WIDTH), tl.arange(0, V_WIDTH)
    real, v_real = (dim[None, :] < DIM) | (DIM == WIDTH), (v_dim[None, :] < V_DIM) | (V_DIM == V_WIDTH)
    distance = diagonal * SIDE + row[:, None] - row[None, :]
    seen = (distance >= 0) & (distance < window) & (distance < length)
    # loaded once per program; -inf gives hidden pairs the probability 0
    bias = tl.load(TABLE + head * table_h + tl.where(seen, distance, 0), mask=seen, other=float("-inf"))
    log2e = 1.4426950408889634  # exp(x) is computed as 2 to the power of x · log2e, which chips compute directly
    bias, scale = bias * log2e, scale * log2e
    total = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    tiles = blocks - diagonal  # number of tiles on this diagonal in one sequence of the batch
    for tile in range(split, tiles * batch, SPLITS):
        b = (tile // tiles).to(tl.int64)
        n = (tile % tiles) * SIDE + row  # keys
        m = n + diagonal * SIDE  # queries
        inside = (m < length) | EVEN
        in_q, in_k = inside[:, None], (n[:, None] < length) | EVEN
        q = tl.load(Q + b * q_b + head * q_h + m[:, None] * q_t + dim[None, :], mask=in_q & real, other=0.0)
        g = tl.load(G + b * g_b + head * g_h + m[:, None] * g_t + v_dim[None, :], mask=in_q & v_real, other=0.0)
        shared = head // GROUP
        k = tl.load(K + b * k_b + shared * k_h + n[:, None] * k_t + dim[None, :], mask=in_k & real, other=0.0)
        v = tl.load(V + b * v_b + shared * v_h + n[:, None] * v_t + v_dim[None, :], mask=in_k & v_real, other=0.0)
        index = (b * heads + head) * length + m
        lse = tl.load(LSE + index, mask=inside, other=float("inf"))  # probability 0 for queries after the last token
        delta = tl.load(DELTA + index, mask=inside, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale + bias - (lse * log2e)[:, None]
        if DOCUMENTS:
            first = tl.load(FIRST + b * length + m, mask=inside, other=0)
            s = tl.where(n[None, :] >= first[:, None], s, float("-inf"))
        total += tl.exp2(s) * (tl.dot(g, tl.trans(v), input_precision="ieee") - delta[:, None])
    start = ((split * heads + head).to(tl.int64) * tl.num_programs(0) + diagonal) * SIDE * SIDE
    tl.store(OUT + start + row[:, None] * SIDE + row[None, :], total)


def splits_per_diagonal(programs: int, tiles: int) -> int:
    """Return the number of programs for each block diagonal of each head.

    Each program writes one partial sum. With one program per diagonal and head, the partial sums for 16,384 tokens and
    12 heads take 48 MiB, at any batch size.

    Args:
        programs: Number of block diagonals times heads.
        tiles: Largest number of tiles of a block diagonal, summed over the batch.
    """
    return max(1, min(8, triton.cdiv(PROGRAMS, programs), tiles // TILES))


def width(dim: int) -> int:
    """Return the smallest power of 2 that is at least ``dim``, and at least 16, which tensor cores need."""
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
    first_key: Tensor | None = None,
) -> Tensor:
    """Return the gradient of the table, in O(T) memory.

    Args:
        grad: Gradient of the output, (B, H, T, δv).
        q: Queries (B, H, T, δ): batch, heads, tokens, head dimension. q, k and v have one dtype, bf16 or fp16. fp32
            works only in the interpreter, because it needs more registers than chips have.
        k: Keys (B, G, T, δ). G divides H.
        v: Values (B, G, T, δv).
        table: Attention bias of each head at distance d = 0, 1, …, (H, >= T) fp32.
        lse: Log-sum-exp of the scores, (B, H, T) fp32.
        delta: Δ (B, H, T) fp32: the sum over δv of grad ∘ output, minus the gradient of ``lse`` if there is one.
        scale: Factor of q·k.
        window: Queries saw only keys at distance < window; None for all.
        first_key: Row of the first key that each query saw, (B, T) int64; None for the first row.

    Returns:
        Contiguous fp32 tensor in the shape of ``table``; 0 at distances that do not occur.
    """
    (batch, heads, length, dim), v_dim = q.shape, v.shape[3]
    lse, delta, table = lse.contiguous(), delta.contiguous(), table.contiguous()
    q, k, v, grad = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, grad.to(q.dtype)))
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (8, 0)
    side, warps, stages = tiling(capability, max(dim, v_dim))
    blocks = triton.cdiv(length, side)
    window = length if window is None else min(window, length)
    diagonals = min(blocks, triton.cdiv(window + side - 1, side))  # all pairs of later diagonals are hidden
    splits = splits_per_diagonal(diagonals * heads, batch * blocks)
    tiles = table.new_empty(splits, heads, diagonals, side, side)
    diagonal_kernel[(diagonals, heads, splits)](
        q, k, v, grad, lse, delta, table, tiles, lse if first_key is None else first_key.to(torch.int32).contiguous(),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *grad.stride()[:3], table.stride(0),
        scale, length, window, batch, heads, blocks,
        DIM=dim, V_DIM=v_dim, WIDTH=width(dim), V_WIDTH=width(v_dim),
        GROUP=heads // k.shape[1], SIDE=side, SPLITS=splits, EVEN=length % side == 0, DOCUMENTS=first_key is not None,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    gradient = torch.zeros_like(table)
    distances = min(length, diagonals * side)
    gradient[:, :distances] = sum_tiles(tiles.sum(0))[:, :distances]
    return gradient


@table_gradient.register_fake
def _(grad, q, k, v, table, lse, delta, scale, window, first_key=None):
    return table.new_empty(table.shape)  # contiguous even if the table is not


def sum_tiles(tiles: Tensor) -> Tensor:
    """Return the sums by distance, (H, diagonals · S), of tiles (H, diagonals, S, S) of side S.

    Entry (r, c) of tile t has the distance t·S + r - c. The columns are reversed, and rows are padded to 2 S entries.
    If the flattened tile is divided into rows of 2 S - 1 entries, each diagonal of the tile becomes a column.
    """
    heads, count, side, _ = tiles.shape
    padded = F.pad(tiles.flip(-1), (0, side)).flatten(2)  # (H, diagonals, S · 2S)
    # entry r + S - 1 - c of the last dimension is the sum of one diagonal
    sums = padded[..., : side * (2 * side - 1)].unflatten(-1, (side, 2 * side - 1)).sum(2)
    total = sums.new_zeros(heads, count + 1, side)
    total[:, 1:] += sums[..., side - 1 :]  # distances t·S to t·S + S - 1
    # distances t·S - (S - 1) to t·S - 1; for tile 0 they are negative, with sums 0
    total[:, :-1, 1:] += sums[..., : side - 1]
    return total.flatten(1)[:, side:]
