"""Capture of the queries, keys, values and mask that the attention of each layer receives."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from kerple.hf.windowed_attention import attention_replaced
from kerple.model import Transformer

NAME = "kerple_probe"  # name of the recording function in transformers' registry of attention functions
HIDDEN = -1e4  # an entry of a mask below this hides the key; transformers uses the lowest number of the dtype


@dataclass
class Call:
    """Arguments of one call of an attention function, for the first sequence of the batch.

    Args:
        layer: Index of the layer.
        q: Queries (H, Tq, δ): H query heads, Tq queries, head dimension δ.
        k: Keys (G, Tk, δ): G key heads, Tk keys.
        v: Values (G, Tk, δ).
        factor: Norm of the first query after the rotation, divided by its norm before the rotation. None if no module
            returned the query before the rotation.
        visible: Whether each query sees each key, (Tq, Tk) bool; None if the function received no mask.
        window: Size of the sliding window that the function received as an argument, or None.
        sinks: Whether the function received the logit of a sink.
        bias: Whether the function received a bias of the scores.
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
    """Context that records every call of an attention function of the model, and yields the list of calls.

    Inside the context, attention returns the value of each query's own token. If the input repeats a single token, all
    positions therefore have the same hidden state in every layer. Queries at different positions differ only by the
    effect of their positions, and so do keys.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface  # an optional package

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
        index = getattr(module, "layer_idx", None)
        layer = len(calls) % model.config.get_text_config().num_hidden_layers if index is None else int(index)
        window = options.get("sliding_window")
        return record(layer, query, key, value, visible, window, sinks, bias).transpose(1, 2).contiguous(), None

    def ours(layer: int, q: Tensor, k: Tensor, v: Tensor, spec: Any, *_: Any) -> Tensor:
        bias = spec.table is not None or spec.modify_scores is not None
        return record(layer, q, k, v, None, spec.window, spec.sink is not None, bias)

    def collect_output(module: nn.Module, args: Any, output: Any) -> None:
        outputs.extend([output] if isinstance(output, Tensor) else [])

    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    with ExitStack() as contexts:
        if isinstance(network := getattr(model, "network", None), Transformer):
            for layer, block in enumerate(network.blocks):
                block.attention.attend = partial(ours, layer)
                contexts.callback(delattr, block.attention, "attend")  # then the class has it again
        contexts.enter_context(attention_replaced(model, NAME, registered))
        contexts.enter_context(register_module_forward_hook(collect_output))
        contexts.enter_context(torch.inference_mode())
        yield calls


def _factor(q: Tensor, outputs: list[Tensor]) -> float | None:
    """Return the factor by which the rotation has changed the norm of the first query, see `Call.factor`.

    The query before the rotation is sought in the outputs of modules, the last output first. It is the first token's
    row of an output, or a part of this row. It must be proportional to the query after the rotation, because the first
    token has position 0 and is rotated by the angle 0.

    Args:
        q: Queries after the rotation, (H, T, δ).
        outputs: Outputs of modules, in order.
    """
    heads, length, width = q.shape
    query = q[:, 0].flatten()  # (H·δ,)
    for output in reversed(outputs):
        output = output.transpose(1, 2) if output.shape[1:3] == (heads, length) else output
        row = output.reshape(-1)[: output.numel() // length]
        # a row begins with the queries of all heads, or lists query, key and value of each head, as in GPT-NeoX
        candidates = [row[: len(query)]]
        candidates += [row.view(heads, -1)[:, :width].reshape(-1)] if row.numel() % heads == 0 else []
        for candidate in candidates if row.numel() >= len(query) else ():
            if torch.cosine_similarity(candidate.double(), query.double(), 0) > 1 - 1e-5:
                return float(query.norm() / candidate.norm())
    return None
