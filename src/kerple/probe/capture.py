"""Capture of the queries, keys, values and mask that the attention of each layer receives."""

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
HIDDEN = -1e4  # a mask with a smaller entry hides the key; transformers uses the smallest number of the dtype


@dataclass
class Call:
    """The arguments of one call of attention, for the first sequence of the batch.

    Args:
        layer: Index of the layer.
        q: Queries (H, Tq, δ) of H heads with head dimension δ.
        k: Keys (G, Tk, δ) of G key heads.
        v: Values (G, Tk, δ).
        factor: Norm of the first query after the rotation, divided by its norm before the rotation. None if no module
            returned the query before the rotation.
        visible: Whether a query sees a key, (Tq, Tk) bool, or None if attention received no mask.
        window: Size of the sliding window that attention received as an argument, or None.
        sinks: Whether attention received a logit of a sink.
        bias: Whether attention received a bias of its scores.
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    factor: float | None
    visible: Tensor | None
    window: int | None
    sinks: bool
    bias: bool


@contextmanager
def captured(model: Any) -> Iterator[list[Call]]:
    """Record every call of attention within the context, and replace its output by the value of each query's token.

    If the input is one token, repeated, all positions then have the same hidden state in every layer. Queries and keys
    differ only by the effect of their positions.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    calls: list[Call] = []
    outputs: list[Tensor] = []  # outputs of the modules since the last call

    def record(layer: int, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
        calls.append(Call(layer, q[0], k[0], v[0], _factor(q[0], outputs), *others))
        outputs.clear()
        return v[:, :, -q.shape[2] :].repeat_interleave(q.shape[1] // v.shape[1], 1)  # (B, H, Tq, δ)

    def registered(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        visible = None if attention_mask is None else attention_mask[0, 0, :, : key.shape[2]] > HIDDEN
        sinks, bias = (options.get(name) is not None for name in ("s_aux", "position_bias"))
        layer, window = int(getattr(module, "layer_idx", len(calls))), options.get("sliding_window")
        return record(layer, query, key, value, visible, window, sinks, bias).transpose(1, 2).contiguous(), None

    def attend(q: Tensor, k: Tensor, v: Tensor, spec: Any, attention: Any = None) -> Tensor:
        layer, bias = len(calls) % len(model.network.blocks), spec.table is not None or spec.modify_scores is not None
        return record(layer, q, k, v, None, spec.window, spec.sink is not None, bias)

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        outputs.extend([output] if isinstance(output, Tensor) else [])

    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    hook, original = register_module_forward_hook(keep), our_attention.attend
    our_attention.attend = attend  # type: ignore[assignment]
    try:
        with attention_replaced(model, NAME, registered), torch.inference_mode():
            yield calls
    finally:
        our_attention.attend = original
        hook.remove()


def _factor(q: Tensor, outputs: list[Tensor]) -> float | None:
    """Norm of the first query, divided by that of the last module output whose first row is proportional to it.

    None if there is no such output.
    """
    heads, length, width = q.shape
    first = q[:, 0].flatten()  # (H·δ,)
    for output in reversed(outputs):
        output = output.transpose(1, 2) if output.shape[1:3] == (heads, length) else output
        row = output.reshape(-1)[: output.numel() // length]
        # an output has all queries first, or the queries, keys and values of each head together, as in GPT-NeoX
        candidates = [row[: len(first)]]
        candidates += [row.view(heads, -1)[:, :width].reshape(-1)] if row.numel() % heads == 0 else []
        for candidate in candidates if row.numel() >= len(first) else ():
            if torch.cosine_similarity(candidate.double(), first.double(), 0) > 1 - 1e-5:
                return float(first.norm() / candidate.norm())
    return None
