"""Attention with a table of biases by distance on a GPU: FlexAttention, and a separate kernel for the table's gradient.

FlexAttention's own gradient of a table that ``score_mod`` reads needs one atomic addition per score. Here FlexAttention
gets the detached table and returns the log-sum-exp. `AddTableGradient` adds the gradient of the table
(`kerple.attention.cuda_table_gradient`). docs/gpu-kernels.md contains the times on an H200.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

MASK_BLOCK = 128  # number of queries and of keys in a block of FlexAttention's mask
RECOMPILATIONS = 64  # largest number of compiled graphs; torch's default of 8 is too low for many lengths and windows
# whether our kernel computes the gradient of a table; FlexAttention's own, with atomics, is measured in benchmarks.gpu
SEPARATE_GRADIENT = True


class AddTableGradient(torch.autograd.Function):
    """Identity function of output and log-sum-exp whose backward pass also returns the gradient of the table."""

    @staticmethod
    def forward(
        ctx,
        out: Tensor,
        lse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        table: Tensor,
        scale: float,
        window: int | None,
        first_key: Tensor | None = None,
    ):
        ctx.save_for_backward(out, lse, q, k, v, table, first_key)
        ctx.scale, ctx.window = scale, window
        ctx.set_materialize_grads(False)  # the log-sum-exp often has no gradient
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    def backward(ctx, grad: Tensor, grad_lse: Tensor | None):
        # imported here, because it needs Triton, which may be missing without a GPU
        from kerple.attention.cuda_table_gradient import table_gradient

        out, lse, q, k, v, table, first_key = ctx.saved_tensors
        delta = (grad.float() * out.float()).sum(-1)  # (B, H, T); computed here, where torch.compile can fuse it
        if grad_lse is not None:
            delta = delta - grad_lse
        grad_table = table_gradient(grad, q, k, v, table, lse, delta, ctx.scale, ctx.window, first_key)
        return grad, grad_lse, None, None, None, grad_table, None, None, None


def attend_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    window: int | None,
    scale: float,
    differentiable_lse: bool,
    first_key: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of T queries and T keys with an attention bias by distance.

    T is padded to one of a few lengths (`padded_length`), so that FlexAttention is compiled for these lengths only.

    Args:
        q: Queries (B, H, T, δ): batch, heads, tokens, head dimension. Autocast does not cast q, k and v.
        k: Keys (B, G, T, δ). G divides H. Consecutive query heads share a key head, which is not copied.
        v: Values (B, G, T, δv).
        table: Attention bias of each head at distance d = 0, 1, …, (H, >= T); None for no bias.
        window: Queries see only keys at distance < window; None for all.
        scale: Factor of q·k.
        differentiable_lse: Whether the log-sum-exp is differentiable.
        first_key: Row of the first key that each query sees, (B, T) int64; None for the first row. See
            `kerple.attention.AttentionSpec.first_key`.

    Returns:
        The output (B, H, T, δv) in the dtype of q, and the log-sum-exp of the scores, (B, H, T) fp32.
    """
    length = q.shape[2]
    padded = padded_length(length)
    rows = [F.pad(x, (0, 0, 0, padded - length)) for x in (q, k, v)] if padded > length else [q, k, v]
    differentiable = table is not None and table.requires_grad and torch.is_grad_enabled()
    separate = differentiable and SEPARATE_GRADIENT
    line = None if table is None else aligned_copies(table.detach() if separate else table, padded)
    # queries after the last token see only keys after it
    first = None if first_key is None else F.pad(first_key, (0, padded - length), value=length).to(torch.int32)
    with torch.autocast(q.device.type, enabled=False):  # FlexAttention would round fp32 to bf16 under autocast
        if torch.compiler.is_compiling():
            out, lse = flex(rows[0], rows[1], rows[2], line, window, first, scale, differentiable_lse)
        else:
            try:
                out, lse = compiled_flex()(*rows, line, window, first, scale, differentiable_lse)
            except Exception as error:  # any error of the compiler or the chip
                error.add_note("use --model.attention blocks, which computes attention without this kernel")
                raise
    out, lse = out[:, :, :length], lse[:, :, :length]
    if separate:
        out, lse = AddTableGradient.apply(out, lse, q.detach(), k.detach(), v.detach(), table, scale, window, first_key)
    return out, lse


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    line: Tensor | None,
    window: int | None,
    first_key: Tensor | None,
    scale: float,
    differentiable_lse: bool,
) -> tuple[Tensor, Tensor]:
    """FlexAttention with the bias of ``line``, the result of `aligned_copies`; None for no bias.

    It must be compiled, because uncompiled FlexAttention stores T × T scores. Compilation also fuses the operations of
    `build_mask`, whose launches would take longer than attention to short texts. Arguments and results without a
    description here are those of `attend_flex`; T is a multiple of 128, and ``first_key`` is int32.
    """
    length, dim = q.shape[2], max(q.shape[3], v.shape[3])
    mask = build_mask(length, window, q.device, first_key)

    def add_bias(score: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        row = (4 * h + ((m + 1) & 3)) * 2 * length
        start = ((length + 2 - m) >> 2) * 4  # & and >> need fewer instructions than % and //
        return score + line[row + start + n]  # type: ignore[index]

    out, aux = flex_attention(  # type: ignore[call-overload]
        q, k, v, score_mod=None if line is None else add_bias, block_mask=mask, scale=scale,
        enable_gqa=q.shape[1] != k.shape[1], return_aux=AuxRequest(lse=True),
        kernel_options=tiles(dim, line is not None),
    )  # fmt: skip
    # detach saves time: without it, the compiled backward pass would subtract zeros, the gradient of the log-sum-exp
    return out, aux.lse if differentiable_lse else aux.lse.detach()


def aligned_copies(table: Tensor, length: int) -> Tensor:
    """Return a table of biases by distance, (H, T), in the layout that `flex` reads, (H · 4 · 2 · length,).

    In a row of reversed distances, the biases of consecutive keys are consecutive numbers. A GPU can load four of them
    at once if the first index is a multiple of four. Therefore each head has four copies of the row: copy s is shifted
    by s numbers, and query m reads copy (m + 1) mod 4, in which its first index is such a multiple. Zeros at the end of
    a row are read for hidden pairs, whose key comes after the query.
    """
    line = F.pad(table[:, :length], (length, max(0, length - table.shape[1]))).flip(-1)  # (H, 2 · length)
    return torch.stack([line.roll(s, -1) for s in range(4)], 1).flatten()  # (H · 4 · 2 · length,)


def tiles(dim: int, table: bool) -> dict[str, Any]:
    """Return options of FlexAttention's kernels: sizes of tiles, and numbers of warps and of pipeline stages.

    They were chosen from 3 to 17 combinations on an H200 (docs/gpu-kernels.md), and fit into the shared memory of chips
    of compute capability 8.0, 8.6 and 9.0. Torch's default for bf16 and head dimension 64 does not fit into the shared
    memory of an H100 (pytorch issue 133254).

    Args:
        dim: The larger of the head dimensions of keys and values.
        table: Whether there is a table of biases.
    """
    if table:
        forward, backward = ((128, 32, 4, 3), (32, 64, 4, 1)) if dim <= 64 else ((64, 32, 4, 3), (32, 64, 4, 2))
    else:
        forward, backward = ((128, 64, 4, 3), (64, 64, 4, 3)) if dim <= 64 else ((128, 64, 8, 3), (64, 64, 4, 2))
    # ROWS_GUARANTEED_SAFE stays false: a window can hide all keys of a tile from a query that sees keys of other tiles
    options = dict(zip(("fwd_BLOCK_M", "fwd_BLOCK_N", "fwd_num_warps", "fwd_num_stages"), forward, strict=True))
    options |= zip(("bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_num_warps", "bwd_num_stages"), backward, strict=True)
    return options | {"bwd_BLOCK_M2": options["bwd_BLOCK_N1"], "bwd_BLOCK_N2": options["bwd_BLOCK_M1"]}


def padded_length(length: int) -> int:
    """Return the smallest of 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, … that is at least ``length``."""
    step = MASK_BLOCK
    while 4 * step < length:
        step *= 2
    return -(-length // step) * step


@cache
def compiled_flex() -> Callable[..., Any]:
    """Return `flex`, compiled; the same function in all calls, so that its graphs are reused."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILATIONS)
    # at the limit torch runs a function uncompiled; with fullgraph it raises an error
    return torch.compile(flex, dynamic=False, fullgraph=True)


def build_mask(length: int, window: int | None, device: torch.device, first_key: Tensor | None = None) -> BlockMask:
    """Build a causal mask with a window and documents from blocks of 128 × 128, without a T × T tensor.

    A query block visits consecutive key blocks. The last one is its own block, in which some pairs are hidden. Before
    it are whole blocks, in which all pairs are visible, and before them blocks in which a window or a document begins.
    The query blocks that visit a key block are the mirror image. So the lists of blocks have closed forms.
    `BlockMask.from_kv_blocks` would sort blocks instead, with more launches of kernels.

    Args:
        length: Number of tokens T, a multiple of 128.
        window: Queries see only keys at distance < window; None for all.
        device: Device of the mask.
        first_key: Row of the first key that each query sees, (B, T) int32, not decreasing and at most the query's own
            row; None for the first row.
    """
    blocks, limit = length // MASK_BLOCK, window or length
    # numbers of blocks that the window alone lets a query block visit, and of the whole ones among them
    near, near_whole = 1 + (limit - 2 + MASK_BLOCK) // MASK_BLOCK, max(limit // MASK_BLOCK - 1, 0)
    i = torch.arange(blocks, device=device)
    if first_key is None:
        start = start_whole = torch.zeros_like(i)[None]
        end = end_whole = start + blocks
    else:
        first, last = first_key[:, ::MASK_BLOCK], first_key[:, MASK_BLOCK - 1 :: MASK_BLOCK]  # of a query block's rows
        start, start_whole = first // MASK_BLOCK, (last + MASK_BLOCK - 1) // MASK_BLOCK  # first key block of each query
        # the query block after the last one that visits each key block
        end = (first[:, None] < (i[:, None] + 1) * MASK_BLOCK).sum(-1)
        end_whole = (last[:, None] <= i[:, None] * MASK_BLOCK).sum(-1)
    keys, whole_keys = (i + 1 - start).clamp(max=near), (i - start_whole).clamp(0, near_whole)  # numbers, (B, blocks)
    queries, whole_queries = (end - i).clamp(max=near), (end_whole - 1 - i).clamp(0, near_whole)

    own, j = i[:, None], i  # the block that a list belongs to, and places in the list
    before, after = keys[..., None] - 1, whole_queries[..., None]
    lists = (  # of a query block's partly visible and whole key blocks, and of a key block's query blocks
        torch.where(j < before - whole_keys[..., None], own - before + j, own),
        own - whole_keys[..., None] + j,
        torch.where(j > 0, own + after + j, own),
        (own + 1 + j).expand(len(keys), -1, -1),
    )
    numbers = (keys - whole_keys, whole_keys, queries - whole_queries, whole_queries)
    # one tensor each, so that torch.compile computes it in one kernel
    counts = torch.stack([x.to(torch.int32) for x in numbers])  # (4, B, blocks)
    indices = torch.stack(lists).clamp(0, blocks - 1).to(torch.int32)  # (4, B, blocks, blocks)

    def with_head(x: Tensor, kind: int) -> Tensor:
        """Return x[kind][:, None]. FlexAttention multiplies the batch index by the stride of this dimension of size 1.

        Without `as_strided`, torch.compile may give it the stride 0. All sequences would have the lists of the first.
        """
        size = math.prod(x.shape[2:])
        return x.as_strided((x.shape[1], 1, *x.shape[2:]), (size, size, *x.stride()[2:]), kind * x.stride(0))

    def visible(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        seen = (m >= n) & (m - n < limit)
        return seen if first_key is None else seen & (n >= first_key[b, m])

    return BlockMask(
        (length, length), with_head(counts, 0), with_head(indices, 0), with_head(counts, 1), with_head(indices, 1),
        with_head(counts, 2), with_head(indices, 2), with_head(counts, 3), with_head(indices, 3),
        BLOCK_SIZE=(MASK_BLOCK, MASK_BLOCK), mask_mod=visible,
    )  # fmt: skip
