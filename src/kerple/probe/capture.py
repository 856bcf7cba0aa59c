"""Queries, keys, values and mask as the attention of each layer receives them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import kerple.model.self_attention as our_attention
from kerple.hf.windows import attention_replaced

NAME = "kerple_probe"
LARGE_NEGATIVE = -1e4  # masks of transformers add the smallest number of the dtype


@dataclass
class Call:
    """What one call of attention has received, for the first sequence of the batch.

    Args:
        layer: Number of the layer.
        q: Queries (H, Tq, δ).
        k: Keys (G, Tk, δ).
        v: Values (G, Tk, δ).
        seen: Which keys each query sees, (Tq, Tk) bool, or None if attention received no mask.
        window: Window that attention received as a number, or None.
        sinks: Whether attention received a logit of a sink.
        bias: Whether attention received a bias of its scores.
        factor: Norm of the first query over its norm before the rotation; None if no module returned that query.
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    seen: Tensor | None = None
    window: int | None = None
    sinks: bool = False
    bias: bool = False
    factor: float | None = None


@contextmanager
def captured(model: Any) -> Iterator[list[Call]]:
    """Record every call of attention within the context, and replace its output by each query's own value.

    With the same token at every position, all positions then have the same hidden state in every layer, so that queries
    and keys differ by their positions only.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    calls: list[Call] = []
    outputs: list[Tensor] = []  # of the modules that have run since the last call

    def record(layer: int, q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Tensor:
        calls.append(Call(layer, q[0], k[0], v[0], factor=_factor(q[0], outputs), **others))
        outputs.clear()
        own = v[:, :, -q.shape[2] :]  # (B, G, Tq, δ)
        return own.repeat_interleave(q.shape[1] // v.shape[1], 1)

    def theirs(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        seen = None if attention_mask is None else attention_mask[0, 0, :, : key.shape[2]] > LARGE_NEGATIVE
        sinks = options.get("s_aux") is not None
        layer = int(getattr(module, "layer_idx", len(calls)))
        window = options.get("sliding_window")
        bias = options.get("position_bias") is not None
        out = record(layer, query, key, value, seen=seen, window=window, sinks=sinks, bias=bias)
        return out.transpose(1, 2).contiguous(), None

    def ours(q: Tensor, k: Tensor, v: Tensor, spec: Any, attention: Any = None) -> Tensor:
        bias = spec.table is not None or spec.modify_scores is not None
        layer, sinks = len(calls) % len(model.network.blocks), spec.sink is not None
        return record(layer, q, k, v, window=spec.window, sinks=sinks, bias=bias)

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            outputs.append(output)

    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    hook, attend = register_module_forward_hook(keep), our_attention.attend
    our_attention.attend = ours  # type: ignore[assignment]
    try:
        with attention_replaced(model, NAME, theirs), torch.inference_mode():
            yield calls
    finally:
        our_attention.attend = attend
        hook.remove()


def _factor(q: Tensor, outputs: list[Tensor]) -> float | None:
    """Norm of the first query over that of the last output of a module which is proportional to it."""
    heads, length, width = q.shape
    first = q[:, 0].flatten().double()  # (H·δ,)
    for output in reversed(outputs):
        if output.ndim == 4 and output.shape[1] == heads and output.shape[2] == length:
            output = output.transpose(1, 2)
        if output.numel() % length or (row := output.reshape(length, -1)[0].double()).numel() < len(first):
            continue
        candidates = [row[: len(first)]]
        if row.numel() % heads == 0:  # queries, keys and values of a head are neighbours in GPT-NeoX
            candidates.append(row.view(heads, -1)[:, :width].flatten())
        for candidate in candidates:
            cosine = torch.nn.functional.cosine_similarity(candidate, first, dim=0)
            if cosine > 1 - 1e-5:
                return float(first.norm() / candidate.norm())
    return None
