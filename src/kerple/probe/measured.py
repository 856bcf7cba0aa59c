"""Measurement of a model's positional encoding from the queries, keys and masks of each layer's attention call."""

from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kerple.hf.adapter import learned_positions, reset_dynamic_rope
from kerple.model import Transformer
from kerple.probe.capture import Call, captured
from kerple.probe.expected import Layer, configured_layers, original_length, our_layers
from kerple.probe.rotation import rotation_differences

SHORT = 32  # number of tokens of the short text
DECODED = 4  # number of tokens that are decoded one by one
# A window is tested with a text that is longer by 3 tokens, if that text has at most this many tokens. For a larger
# window, 4 tokens are read after a cache filled with zeros.
LONGEST = 1040
SAME = 1e-3  # largest relative difference of numbers that are considered equal


@dataclass
class Pass:
    """The attention calls for one text that repeats a single token, read in one or several forward passes.

    Args:
        label: Name of the text in messages.
        rows: Indices of the tokens in the input, (T,) int64.
        ids: Positions of the tokens, (T,) int64.
        calls: The calls by layer, one for each forward pass; empty if the model cannot read the text.
    """

    label: str
    rows: Tensor
    ids: Tensor
    calls: dict[int, list[Call]]


@dataclass
class Verdict:
    """Comparison of one layer with the configuration.

    Args:
        layer: Index of the layer.
        expected: Description of the layer according to the configuration.
        measured: Description of the layer according to its forward pass.
        differences: Differences between the two; empty if they agree.
        unknown: Reason why something was not measured or not judged, or None.
    """

    layer: int
    expected: str
    measured: str = ""
    differences: list[str] = field(default_factory=list)
    unknown: str | None = None

    @property
    def verdict(self) -> str:
        """``agrees``, ``differs`` or ``not measurable``."""
        return "differs" if self.differences else "not measurable" if self.unknown else "agrees"


def measure_layers(model: Any, config: Any) -> list[Verdict]:
    """Compare every layer of a model with a configuration.

    Args:
        model: A `transformers.PreTrainedModel` in evaluation mode and fp32.
        config: The configuration of its text model, as it was read from the model's files.
    """
    ours = isinstance(getattr(model, "network", None), Transformer)
    expected = our_layers(model.network) if ours else configured_layers(config)
    if getattr(config, "kv_lora_rank", None):
        reason = "latent attention (MLA) has no plain queries and keys"
        return [Verdict(i, str(layer), unknown=reason) for i, layer in enumerate(expected)]
    learned = learned_positions(model) is not None
    passes = _passes(model, config, expected, relative=not learned and not ours)
    return [_verdict(i, layer, passes, learned) for i, layer in enumerate(expected)]


def _passes(model: Any, config: Any, expected: list[Layer], relative: bool) -> list[Pass]:
    """Read several texts that repeat a single token: a short one, and one with decoding.

    With ``relative``, also read a longer text for each different window, and the positions 0, 1, 2, 4, … up to the
    largest of the configuration. Learned positions, and strategies of this project, need not accept such positions.
    """
    length, longest = original_length(config), getattr(config, "max_position_embeddings", None) or 0
    norms = model.get_input_embeddings().weight[:1000].float().norm(dim=-1)
    token = int(norms.argmax())  # not the padding token, whose embedding is 0
    windows = {w for layer in expected if (w := layer.window or layer.chunk) and w < max(longest, LONGEST)}
    short = min(SHORT, length or SHORT)
    passes = [_read(model, token, "a short text", [short])]
    for w in sorted(windows) if relative else ():
        zeros = None if w + 3 <= LONGEST else _cache_of_zeros(passes[0], w - 1)
        passes.append(_read(model, token, f"a text longer than {w}", [w + 3 if zeros is None else 4], None, zeros))
    if relative and longest:
        scale = max((layer.rope.frequencies.factor for layer in expected if layer.rope), default=1.0)
        end = int(longest * scale) if longest == length else longest
        ids = torch.tensor(sorted({0, *(1 << k for k in range(40) if 1 << k < end), end - 1}))
        passes.append(_read(model, token, f"positions up to {end - 1}", [len(ids)], ids))
    return [*passes, _read(model, token, "decoding", [max(1, short // 2), *[1] * DECODED])]


def _read(model: Any, token: int, label: str, sizes: list[int], ids: Tensor | None = None, cache: Any = None) -> Pass:
    """Read a text that repeats a single token.

    Args:
        model: The model.
        token: Id of the token.
        label: Name of the text in messages.
        sizes: Number of tokens of each forward pass.
        ids: Positions of the tokens, (T,) int64; None for their indices in the input.
        cache: Cache of tokens before the text, or None.
    """
    first = 0 if cache is None else cache.get_seq_length()
    rows = torch.arange(first, first + sum(sizes))
    options: dict[str, Any] = {} if ids is None else {"position_ids": ids[None].to(model.device)}
    use_cache = len(sizes) > 1 or cache is not None
    reset_dynamic_rope(model)
    with captured(model) as calls, suppress(ValueError, RuntimeError):  # `measure_invariances` reports such errors
        for size in sizes:
            options |= {} if cache is None else {"cache": cache}
            tokens = torch.full((1, size), token, device=model.device)
            cache = model(input_ids=tokens, use_cache=use_cache, **options).get("cache")
    by_layer: dict[int, list[Call]] = defaultdict(list)
    # after an error, some tokens have no call, and the pass is left empty
    for call in calls if sum(call.q.shape[1] for call in calls if call.layer == calls[0].layer) == len(rows) else ():
        by_layer[call.layer].append(call)
    return Pass(label, rows, rows if ids is None else ids, by_layer)


def _cache_of_zeros(earlier: Pass, length: int) -> Any:
    """Return a cache of ``length`` keys and values that are 0, with the number of heads of an earlier pass."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for i, (call, *_) in sorted(earlier.calls.items()):
        keys, values = (x.new_zeros(1, len(x), length, x.shape[-1]) for x in (call.k, call.v))
        cache.update(keys, values, i)
    return cache


def _verdict(i: int, layer: Layer, passes: list[Pass], learned: bool) -> Verdict:
    """Compare layer ``i`` with its configuration; ``learned`` is whether the model has learned positions."""
    verdict, notes = Verdict(i, str(layer)), []
    if i not in passes[0].calls:
        reason = "the forward pass failed, or attention does not use transformers' registry of attention functions"
        verdict.unknown = f"no attention call was recorded: {reason}"
        return verdict
    for p in passes:
        if not (calls := p.calls.get(i)):
            continue
        differences = _window_differences(calls, p, layer)
        q = torch.cat([call.q for call in calls], 1)
        k = torch.cat([call.k[:, -call.q.shape[1] :] for call in calls], 1)
        v = torch.cat([call.v[:, -call.q.shape[1] :] for call in calls], 1)
        v = v / v.abs().max()
        if float((v - v[:, :1]).abs().max()) <= SAME:
            found: dict[str, list[str]] = defaultdict(list)
            for x, what in ((k, "keys"), (q, "queries")) if p.rows[0] == 0 else ():
                messages, radians = rotation_differences(x, what, p.rows, p.ids, layer)
                for message in messages:
                    found[message].append(what)
            notes += [_describe(radians)] if p is passes[0] else []
            differences += [f"{' and '.join(of)}: {message}" for message, of in found.items()]
            factor = calls[0].factor
            if layer.rope is not None and factor is not None and p is passes[0]:
                notes += [f"attention factor {factor:.4g}"] if abs(factor - 1) > SAME else []
                if abs(factor / layer.rope.attention_factor - 1) > SAME:
                    differences.append(f"attention factor {factor:.4g}, expected {layer.rope.attention_factor:.4g}")
        elif learned:
            notes = ["positions are added to the hidden states"]
            distinct = len(v.mul(1e4).round().unique(dim=1)[0])
            if distinct < v.shape[1]:
                differences.append(f"{v.shape[1]} positions have only {distinct} different hidden states")
        else:
            verdict.unknown = "hidden states of a repeated token differ, so that the rotation cannot be measured"
        verdict.differences = verdict.differences or [f"{message} ({p.label})" for message in differences]
    calls = [call for p in passes for call in p.calls.get(i, [])]
    sizes = [call.window or 0 if call.visible is None else int(call.visible.sum(1).max()) for call in calls]
    notes += [f"window {max(sizes)}"] if 0 < max(sizes) < max(int(p.rows[-1]) + 1 for p in passes) else ["no window"]
    notes += [name for name in ("sinks", "bias") if any(getattr(call, name) for call in calls)]
    verdict.measured = ", ".join(notes)
    if verdict.differences and not layer.judged:
        first = "; ".join(verdict.differences[:2])
        verdict.unknown = f"not judged, because this model family is not known; first differences: {first}"
        verdict.differences = []
    return verdict


def _describe(radians: Tensor) -> str:
    """Describe a rotation by the measured radians per position of its pairs of channels."""
    if not len(radians):
        return "queries are 0"
    low, high = float(radians.abs().min()), float(radians.abs().max())
    if high < 1e-5:
        return "no rotation of queries and keys"
    return f"rotates by {high:.4g} to {low:.4g} radians per position"


def _window_differences(calls: list[Call], p: Pass, layer: Layer) -> list[str]:
    """Return a list of at most one message: the first query that sees other keys than configured, or a wrong argument.

    The argument is the window that the model passes to the attention function.
    """
    begin = int(p.rows[0])
    for call in calls if p.ids is p.rows else ():
        rows = torch.arange(begin, begin := begin + call.q.shape[1])
        if call.visible is not None:
            expected = layer.sees(rows, torch.arange(begin - call.visible.shape[1], begin))
            for row in (call.visible.cpu() != expected).any(1).nonzero()[:1, 0].tolist():
                wanted = int(layer.sees(rows[row : row + 1], torch.arange(begin)).sum())
                return [f"query {int(rows[row])} sees {int(call.visible[row].sum())} keys, expected {wanted}"]
    if calls[0].window not in (None, layer.window, layer.chunk):
        return [f"attention received a window of {calls[0].window}, expected {layer.window or layer.chunk}"]
    return []
