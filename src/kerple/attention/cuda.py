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

from kerple.attention.backend import note_on_failure

MASK_BLOCK = 128  # of FlexAttention's masks
RECOMPILATIONS = 64  # past its limit, 8 by default, torch runs FlexAttention uncompiled: T × T scores


class AddTableGradient(torch.autograd.Function):
    """Output and log-sum-exp as they are; in the backward pass, the gradient of the table they were computed with."""

    @staticmethod
    def forward(
        ctx, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor, scale: float, window: int | None
    ):
        ctx.save_for_backward(out, lse, q, k, v, table)
        ctx.scale, ctx.window = scale, window
        ctx.set_materialize_grads(False)
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    def backward(ctx, grad: Tensor | None, grad_lse: Tensor | None):
        from kerple.attention.diagonals import table_gradient  # Triton is there only where a GPU is

        out, lse, q, k, v, table = ctx.saved_tensors
        grad = torch.zeros_like(out) if grad is None else grad
        delta = (grad.float() * out.float()).sum(-1)  # (B, H, T); here, not in the kernel's op, so that it is fused
        if grad_lse is not None:
            delta = delta - grad_lse
        added = table_gradient(grad, q, k, v, table, lse, delta, ctx.scale, ctx.window)
        return grad, grad_lse, None, None, None, added, None, None


def attend_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    window: int | None,
    scale: float | None = None,
    differentiable_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Causal attention of T queries and T keys with a bias by distance, and the log-sum-exp of its scores.

    T is padded to the next length of a fixed ladder: each of its lengths compiles once.

    Args:
        q: (B, H, T, δ), all of one dtype with k and v, whatever autocast says.
        k: (B, G, T, δ), G a divisor of H: consecutive query heads share a key head, which is not copied.
        v: (B, G, T, δv).
        table: (H, >= T), added to the scaled score at distance d.
        window: Only keys at distance < window are seen.
        scale: Of q·k; 1/√δ if None.
        differentiable_lse: Whether a gradient may come back through the log-sum-exp.

    Returns:
        (B, H, T, δv) in the dtype of q, and (B, H, T) fp32, natural logarithm.
    """
    length, scale = q.shape[2], q.shape[3] ** -0.5 if scale is None else scale
    padded = ladder(length)
    rows = [F.pad(x, (0, 0, 0, padded - length)) for x in (q, k, v)] if padded > length else [q, k, v]
    line = None
    if table is not None:
        line = table.detach()[:, :padded]
        line = F.pad(line, (0, padded - line.shape[1])).contiguous()  # (H, padded)
    kernel_options = tiles(shared_memory(q.device), max(q.shape[3], v.shape[3]))
    with torch.autocast(q.device.type, enabled=False):  # its own autocast would round fp32 to bf16
        if torch.compiler.is_compiling():
            mask = build_mask(padded, window, q.device)
            out, lse = flex(rows[0], rows[1], rows[2], line, mask, scale, differentiable_lse, kernel_options)
        else:
            mask = causal_mask(padded, window, q.device)
            with note_on_failure("--model.attention blocks computes attention without this kernel"):
                out, lse = compiled_by_itself()(*rows, line, mask, scale, differentiable_lse, kernel_options)
    out, lse = out[:, :, :length], lse[:, :, :length]
    if table is not None and table.requires_grad and torch.is_grad_enabled():
        out, lse = AddTableGradient.apply(out, lse, q.detach(), k.detach(), v.detach(), table, scale, window)
    return out, lse


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    line: Tensor | None,
    mask: BlockMask,
    scale: float,
    differentiable_lse: bool,
    kernel_options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """FlexAttention with ``line[h, m - n]`` added; to be compiled, as uncompiled it writes the scores down."""

    def add_bias(score: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        # what the mask hides is computed too
        return score + line[h, torch.clamp(m - n, min=0)]  # type: ignore[index]

    out, aux = flex_attention(  # type: ignore[call-overload]
        q, k, v, score_mod=None if line is None else add_bias, block_mask=mask, scale=scale,
        enable_gqa=q.shape[1] != k.shape[1], return_aux=AuxRequest(lse=True), kernel_options=kernel_options,
    )  # fmt: skip
    # detached here, inside what is compiled: outside, the backward pass would be given a tensor of zeros for it
    return out, aux.lse if differentiable_lse else aux.lse.detach()


def tiles(shared: int, dim: int) -> dict[str, Any]:
    """Sizes of FlexAttention's tiles: large ones that fit the chip's shared memory and spill no register.

    Torch's own choice for bf16, δ 64 on an H100 needs 245,760 bytes of its 232,448 and does not launch (pytorch issue
    133254). From ahead-of-time compilations (`benchmarks.gpu.kernels`), not from timings.

    Args:
        shared: Bytes of shared memory a block of threads may have.
        dim: The wider of δ and δv.
    """
    wide = dim > 64
    if shared >= 232_448:  # H100, H200, B200
        forward = (128, 64, 8, 2) if wide else (128, 64, 4, 2)
        backward = (64, 64, 64, 64, 8, 2) if wide else (64, 128, 128, 64, 8, 3)
    else:
        backward = (64, 64, 64, 64, 8, 2) if wide else (32, 128, 128, 32, 8, 2)
        if shared >= 166_912:  # A100
            forward = (128, 64, 8, 3) if wide else (128, 64, 4, 3)
        else:  # 101,376 on the smaller chips of these families
            forward = (64, 64, 4, 2) if wide else (128, 64, 8, 2)
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    more = ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "num_warps", "num_stages")
    return {
        "ROWS_GUARANTEED_SAFE": True,  # every row sees itself
        **{f"fwd_{name}": size for name, size in zip(names, forward, strict=True)},
        **{f"bwd_{name}": size for name, size in zip(more, backward, strict=True)},
    }


@torch.compiler.assume_constant_result
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory a block of threads may have; 0 where there is none."""
    properties: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return 0 if properties is None else properties.shared_memory_per_block_optin


def ladder(length: int) -> int:
    """The smallest of 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, … that is no shorter than ``length``."""
    step = MASK_BLOCK
    while 4 * step < length:
        step *= 2
    return -(-length // step) * step


@cache
def compiled_by_itself() -> Callable[..., Any]:
    """`flex`, compiled once for the process: for a network that is not compiled itself."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILATIONS)
    # fullgraph: past the limit it raises, where torch would go on with T × T scores
    return torch.compile(flex, dynamic=False, fullgraph=True)


@lru_cache(maxsize=32)
def causal_mask(length: int, window: int | None, device: torch.device) -> BlockMask:
    """Return `build_mask`, computed once for each shape; it serves training also if evaluation needs it first."""
    with torch.inference_mode(False), torch.no_grad():  # autograd refuses to save a tensor of inference mode
        return build_mask(length, window, device)


def build_mask(length: int, window: int | None, device: torch.device) -> BlockMask:
    """Build the mask of blocks of 128 × 128 that are empty, partial or full, without a T × T tensor; T % 128 is 0."""
    blocks = length // MASK_BLOCK
    window = length if window is None else window
    i = torch.arange(blocks, device=device)
    behind = i[:, None] - i  # (query block, key block)
    visited = (behind >= 0) & ((behind - 1) * MASK_BLOCK + 1 < window)
    whole = visited & (behind > 0) & ((behind + 1) * MASK_BLOCK - 1 < window)

    def ordered(kind: Tensor) -> tuple[Tensor, Tensor]:
        order = kind.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        return kind.sum(-1).to(torch.int32)[None, None], order.to(torch.int32)[None, None]

    def visible(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        return (m >= n) & (m - n < window)

    partial_count, partial_index = ordered(visited & ~whole)
    whole_count, whole_index = ordered(whole)
    return BlockMask.from_kv_blocks(
        partial_count, partial_index, whole_count, whole_index, BLOCK_SIZE=MASK_BLOCK, mask_mod=visible,
        seq_lengths=(length, length),
    )  # fmt: skip
