"""Attention with a learned table on a GPU: FlexAttention with the table held constant, its gradient beside it.

FlexAttention's own gradient of a captured table takes one atomic per score. So it gets the detached table and returns
the log-sum-exp, and a pass-through node adds the table's gradient (`diagonals`). Not yet timed on a GPU.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

BLOCK = 128  # of FlexAttention's masks


class AddTableGradient(torch.autograd.Function):
    """The output as it is; on the way back, the gradient of the table the output was computed with."""

    @staticmethod
    def forward(ctx, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor, window: int | None):
        ctx.save_for_backward(out, lse, q, k, v, table)
        ctx.window = window
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad: Tensor):
        from kerple.attention.diagonals import table_gradient  # Triton is there only where a GPU is

        out, lse, q, k, v, table = ctx.saved_tensors
        return grad, None, None, None, None, table_gradient(grad, q, k, v, table, out, lse, ctx.window), None


def attend_flex(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, window: int | None) -> Tensor:
    """Causal attention of T queries and T keys with a bias by distance; arguments as in `kerple.attention.attend`.

    T is padded to the next length of a fixed ladder: each of its lengths compiles once. q, k, v have one dtype already:
    FlexAttention ignores autocast.
    """
    length = q.shape[2]
    padded = ladder(length)
    rows = [F.pad(x, (0, 0, 0, padded - length)) for x in (q, k, v)] if padded > length else [q, k, v]
    mask = causal_mask(padded, window, q.device)
    if table is None:
        return compiled()(*rows, block_mask=mask)[:, :, :length]
    line = table.detach()[:, :padded]
    line = F.pad(line, (0, padded - line.shape[1])).contiguous()  # (H, padded)

    def add_bias(score: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        return score + line[h, torch.clamp(m - n, min=0)]  # what the mask hides is computed too

    out, aux = compiled()(*rows, score_mod=add_bias, block_mask=mask, return_aux=AuxRequest(lse=True))
    out = out[:, :, :length]
    if not table.requires_grad:
        return out
    lse = aux.lse.detach()[:, :, :length]
    return AddTableGradient.apply(out, lse, q.detach(), k.detach(), v.detach(), table, window)


def ladder(length: int) -> int:
    """The smallest of 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, … that is no shorter than ``length``."""
    step = BLOCK
    while 4 * step < length:
        step *= 2
    return -(-length // step) * step


def compiled() -> Callable[..., Any]:
    """FlexAttention, compiled for each shape: uncompiled it writes the scores down."""
    return flex_attention if torch.compiler.is_compiling() else compiled_by_itself()


@cache
def compiled_by_itself() -> Callable[..., Any]:
    """FlexAttention, compiled once for the process: for a network that is not compiled itself."""
    # past its limit, 8 by default, torch runs FlexAttention uncompiled: T × T scores. The ladder is longer than that
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return torch.compile(flex_attention, dynamic=False)


@lru_cache(maxsize=32)
def causal_mask(length: int, window: int | None, device: torch.device) -> BlockMask:
    """Which blocks of 128 × 128 are empty, partial or full, found without a T × T tensor; T a multiple of 128."""
    blocks = length // BLOCK
    reach = length if window is None else window
    i = torch.arange(blocks, device=device)
    behind = i[:, None] - i  # (query block, key block)
    some = (behind >= 0) & ((behind - 1) * BLOCK + 1 < reach)
    whole = some & (behind > 0) & ((behind + 1) * BLOCK - 1 < reach)

    def ordered(kind: Tensor) -> tuple[Tensor, Tensor]:
        order = kind.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        return kind.sum(-1).to(torch.int32)[None, None], order.to(torch.int32)[None, None]

    def visible(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        return (m >= n) & (m - n < reach)

    partial_count, partial_index = ordered(some & ~whole)
    whole_count, whole_index = ordered(whole)
    return BlockMask.from_kv_blocks(
        partial_count, partial_index, whole_count, whole_index, BLOCK_SIZE=BLOCK, mask_mod=visible,
        seq_lengths=(length, length),
    )  # fmt: skip
