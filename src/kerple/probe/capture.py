"""Capture of the queries, keys, values and mask that the attention of each layer receives."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from kerple.base.errors import UserError
from kerple.hf.windowed_attention import attention_replaced
from kerple.model import Transformer
from kerple.probe.reading import read_logits

NAME = "kerple_probe"  # name of the recording function in transformers' registry of attention functions
SHORT = 32  # number of tokens of the short text
SAME = 1e-3  # largest relative difference of numbers that are considered equal
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
        scale: Factor of q·k that the function received, or 1/√δ if it received none.
        softcap: Soft cap of the scores that the function received, or None.
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
    scale: float
    softcap: float | None
    window: int | None
    sinks: bool
    bias: bool


def repeated_token(model: Any) -> int:
    """Return the id of the token that texts repeat. It is not the padding token, whose embedding is 0."""
    return int(model.get_input_embeddings().weight[:1000].float().norm(dim=-1).argmax())


def find_mixers(model: Any) -> set[nn.Module]:
    """Return the mixers of a model, see `captured`. They are found with a short text."""
    mixers: set[nn.Module] = set()
    text = torch.full((1, SHORT), repeated_token(model), device=model.device)
    with suppress(UserError), captured(model, mixers, search=True):  # `measure_invariances` reports such errors
        read_logits(model, text)
    return mixers


@contextmanager
def captured(model: Any, mixers: set[nn.Module], search: bool = False) -> Iterator[list[Call]]:
    """Context that records every call of an attention function of the model, and yields the list of calls.

    Inside the context, attention returns the value of each query's own token. If the input repeats a single token, all
    positions therefore have the same hidden state in every layer. Queries at different positions differ only by the
    effect of their positions, and so do keys.

    A *mixer* is a module other than attention that moves information between tokens, such as linear attention, a
    state-space layer or a convolution. Its outputs are replaced by zeros, so that hidden states stay equal.

    Args:
        model: A `transformers.PreTrainedModel`.
        mixers: Mixers of the model.
        search: Whether to add to ``mixers`` every mixer that the model calls. The input must repeat a token. A mixer is
            the innermost module that makes different outputs from equal hidden states and calls no attention function.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface  # an optional package

    calls_before: dict[nn.Module, int] = {}
    calls: list[Call] = []
    outputs: list[Tensor] = []  # outputs of the modules since the last call

    rotated = getattr(model.config.get_text_config(), "qk_rope_head_dim", None) or 0

    def record(layer: int, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
        calls.append(Call(layer, q[0], k[0], v[0], _factor(q[0], outputs, q.shape[-1] - rotated), *others))
        outputs.clear()
        return v[:, :, -q.shape[2] :].repeat_interleave(q.shape[1] // v.shape[1], 1)  # (B, H, Tq, δ)

    def registered(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        mask = None if attention_mask is None else attention_mask[0, 0, :, : key.shape[2]]
        visible = mask if mask is None or mask.dtype == torch.bool else mask > HIDDEN
        sinks, bias = (options.get(name) is not None for name in ("s_aux", "position_bias"))
        index = getattr(module, "layer_idx", None)
        layer = len(calls) % model.config.get_text_config().num_hidden_layers if index is None else int(index)
        scale = options.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        scores = scale, options.get("softcap"), options.get("sliding_window"), sinks, bias
        return record(layer, query, key, value, visible, *scores).transpose(1, 2).contiguous(), None

    def ours(layer: int, q: Tensor, k: Tensor, v: Tensor, spec: Any, *_: Any) -> Tensor:
        bias = any(x is not None for x in (spec.table, spec.key_bias, spec.query_bias, spec.modify_scores))
        return record(layer, q, k, v, None, spec.scale_of(q), None, spec.window, spec.sink is not None, bias)

    def count_calls(module: nn.Module, args: Any) -> None:
        calls_before[module] = len(calls)

    def collect_output(module: nn.Module, args: Any, options: Any, output: Any) -> Any:
        outputs.extend([output] if isinstance(output, Tensor) else [])
        first = output[0] if isinstance(output, tuple) and output else output
        if search and len(calls) == calls_before[module] and isinstance(first, Tensor):
            inputs = [x for x in (*args, *options.values()) if isinstance(x, Tensor) and x.shape == first.shape]
            mixers.update([module] if inputs and first.ndim == 3 and _equal(inputs[0]) and not _equal(first) else [])
        if module not in mixers:
            return None
        zeros = torch.zeros_like(first)
        return (zeros, *output[1:]) if isinstance(output, tuple) else zeros

    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    with ExitStack() as contexts:
        if isinstance(network := getattr(model, "network", None), Transformer):
            for layer, block in enumerate(network.blocks):
                block.attention.attend = partial(ours, layer)
                contexts.callback(delattr, block.attention, "attend")  # then the class has it again
        contexts.enter_context(attention_replaced(model, NAME, registered))
        contexts.enter_context(register_module_forward_pre_hook(count_calls))
        contexts.enter_context(register_module_forward_hook(collect_output, with_kwargs=True))
        contexts.enter_context(torch.inference_mode())
        yield calls


@contextmanager
def recorded_outputs(modules: Iterable[nn.Module]) -> Iterator[dict[nn.Module, list[Tensor]]]:
    """Context that records the output of each call of some modules, and yields the outputs by module.

    If a module returns a tuple, the first entry is recorded.
    """
    outputs: dict[nn.Module, list[Tensor]] = {module: [] for module in modules}

    def record(module: nn.Module, args: Any, output: Any) -> None:
        outputs[module].append(output[0] if isinstance(output, tuple) else output)

    with ExitStack() as hooks:
        for module in outputs:
            hooks.enter_context(module.register_forward_hook(record))
        yield outputs


def _equal(x: Tensor) -> bool:
    """Return whether all tokens have equal vectors in ``x`` (B, T, D), up to rounding."""
    return float((x - x[:, :1]).abs().max()) <= SAME * float(x.abs().max())


def _factor(q: Tensor, outputs: list[Tensor], compared: int) -> float | None:
    """Return the factor by which the rotation has changed the norm of the first query, see `Call.factor`.

    The query before the rotation is sought in the outputs of modules, the last output first. It is the first token's
    row of an output, or a part of this row. It must be proportional to the query after the rotation, because the first
    token has position 0 and is rotated by the angle 0. In latent attention, the first channels are not rotated and must
    be equal, and the order of the others may differ.

    Args:
        q: Queries after the rotation, (H, T, δ).
        outputs: Outputs of modules, in order.
        compared: Number of first channels of a head that are compared: δ, or in latent attention those without RoPE.
    """
    heads, length, width = q.shape
    query = q[:, 0].flatten()  # (H·δ,)
    rotated = slice(compared if compared < width else 0, None)
    for output in reversed(outputs):
        output = output.transpose(1, 2) if output.shape[1:3] == (heads, length) else output
        row = output.reshape(-1)[: output.numel() // length]
        # a row begins with the queries of all heads, or lists query, key and value of each head, as in GPT-NeoX
        candidates = [row[: len(query)]]
        candidates += [row.view(heads, -1)[:, :width].reshape(-1)] if row.numel() % heads == 0 else []
        for candidate in candidates if row.numel() >= len(query) else ():
            old, new = (x.view(heads, width).double() for x in (candidate, query))
            if torch.cosine_similarity(old[:, :compared].flatten(), new[:, :compared].flatten(), 0) > 1 - 1e-5:
                return float(new[:, rotated].norm() / old[:, rotated].norm())
    return None
