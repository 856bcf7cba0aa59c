"""Measurement of a model's positional encoding from the queries, keys and masks that each attention layer receives."""

import re
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kerple.base.errors import UserError, describe
from kerple.hf.position_limit import learned_positions
from kerple.model import Transformer
from kerple.probe.capture import SAME, SHORT, Call, captured, find_mixers, recorded_outputs, repeated_token
from kerple.probe.configured_positions import Layer, configured_layers, original_length, our_layers
from kerple.probe.reading import read_logits
from kerple.probe.rotation import Rotation, rotation_differences

DECODED = 4  # number of tokens that are decoded one by one
# Largest number of tokens of a text that tests a window. Such a text has 3 tokens more than the window. If this number
# is above LONGEST, the model reads only 4 tokens, after a cache filled with zeros.
LONGEST = 1040
MIXERS = {
    "delta|linear|lightning|kda": "linear attention",
    "mamba|ssm|falconh1": "state-space layer",
    "conv": "convolution",
}
"""Patterns of class names of modules that mix tokens without attention, and the kinds of these modules."""


@dataclass
class Trace:
    """The attention calls of a model that reads a text in one or several forward passes. The text repeats one token.

    Args:
        label: Name of the text in messages.
        rows: Indices of the tokens in the input, (T,) int64.
        ids: Positions of the tokens, (T,) int64.
        calls: The calls of each layer by its index, one call per forward pass. Layers after an error have none.
        error: Type and first line of the error that the model raised, or None.
    """

    label: str
    rows: Tensor
    ids: Tensor
    calls: dict[int, list[Call]]
    error: str | None = None

    def vectors(self, layer: int, name: str) -> Tensor:
        """Return the queries (``q``), keys (``k``) or values (``v``) of a layer for the T tokens, (heads, T, δ)."""
        return torch.cat([getattr(call, name)[:, -call.q.shape[1] :] for call in self.calls[layer]], 1)


@dataclass
class Verdict:
    """Comparison of the forward pass of one layer with the configuration.

    Args:
        layer: Index of the layer.
        expected: Description of the layer according to the configuration.
        measured: Description of the layer according to its forward pass.
        differences: Differences between configuration and forward pass; empty if they agree.
        unknown: Reason why the layer was not measured, or why its differences are not counted as faults; or None.
        rotation: Rotation of the keys in the text with the largest positions, or None.
        seen: For each query of the longest text without a cache, the number of keys that it sees, and the number that
            the configuration states. Empty if the attention function received no mask.
    """

    layer: int
    expected: str
    measured: str = ""
    differences: list[str] = field(default_factory=list)
    unknown: str | None = None
    rotation: Rotation | None = field(default=None, repr=False)
    seen: list[tuple[int, int]] = field(default_factory=list, repr=False)

    @property
    def verdict(self) -> str:
        """``agrees``, ``differs``, ``not judged`` (its differences are not counted as faults) or ``not measured``."""
        unknown = "not judged" if self.measured else "not measured"
        return "differs" if self.differences else unknown if self.unknown else "agrees"


def measure_layers(model: Any, config: Any) -> list[Verdict]:
    """Compare every layer of a model with a configuration.

    Args:
        model: A `transformers.PreTrainedModel` in evaluation mode and fp32.
        config: The configuration of its text model, as it was read from the model's files.
    """
    ours = isinstance(getattr(model, "network", None), Transformer)
    expected = our_layers(model.network) if ours else configured_layers(config)
    learned = learned_positions(model) is not None
    mixers = find_mixers(model)
    traces = _read_texts(model, config, expected, not learned and not ours, mixers)
    verdicts = [_verdict(i, layer, traces, learned) for i, layer in enumerate(expected)]
    _describe_mixers(model, mixers, verdicts)
    return verdicts


def _read_texts(model: Any, config: Any, expected: list[Layer], relative: bool, mixers: set[nn.Module]) -> list[Trace]:
    """Read several texts that repeat a single token: a short text, and a text whose last tokens are decoded one by one.

    With ``relative``, also read a text longer than the window for each different window, and a text with the positions
    0, 1, 2, 4, … up to the largest of the configuration. ``relative`` is false for models with learned positions and
    for models of this project, because such models may not accept these positions. The outputs of ``mixers`` are
    replaced, see `captured`.
    """
    length, max_positions = original_length(config), getattr(config, "max_position_embeddings", None) or 0
    read = partial(_read, model, mixers)
    windows = {w for layer in expected if (w := layer.window or layer.chunk) and w < max(max_positions, LONGEST)}
    short = min(SHORT, length or SHORT)
    traces = [read("a short text", [short])]
    for w in sorted(windows) if relative else ():
        zeros = None if w + 3 <= LONGEST else _cache_of_zeros(traces[0], w - 1)
        traces.append(read(f"a text longer than {w}", [w + 3 if zeros is None else 4], None, zeros))
    if relative and max_positions:
        scale = max((layer.rope.frequencies.factor for layer in expected if layer.rope), default=1.0)
        end = int(max_positions * scale) if max_positions == length else max_positions
        ids = torch.tensor(sorted({0, *(1 << k for k in range(40) if 1 << k < end), end - 1}))
        traces.append(read(f"positions up to {end - 1}", [len(ids)], ids))
    return [*traces, read("decoding", [max(1, short // 2), *[1] * DECODED])]


def _read(
    model: Any, mixers: set[nn.Module], label: str, sizes: list[int], ids: Tensor | None = None, cache: Any = None
) -> Trace:
    """Read a text that repeats a single token.

    Args:
        model: The model.
        mixers: Modules whose outputs are replaced, see `captured`.
        label: Name of the text in messages.
        sizes: Number of tokens of each forward pass.
        ids: Positions of the tokens, (T,) int64; None for their indices in the input.
        cache: Cache of the tokens before the text; None if the text is the whole input.
    """
    first = 0 if cache is None else cache.get_seq_length()
    rows = torch.arange(first, first + sum(sizes))
    options: dict[str, Any] = {} if ids is None else {"position_ids": ids[None].to(model.device)}
    parts = sizes if len(sizes) > 1 or cache is not None else None
    tokens, failure = torch.full((1, len(rows)), repeated_token(model), device=model.device), None
    with captured(model, mixers) as calls:
        try:
            read_logits(model, tokens, parts, cache, **options)
        except UserError as error:  # it has a cause, unless the model has no cache
            failure = describe(error.__cause__) if error.__cause__ else None
    by_layer: dict[int, list[Call]] = {}
    for layer in {call.layer for call in calls}:
        found = [call for call in calls if call.layer == layer]
        found = found[:: max(1, len(found) // len(sizes))]  # of a layer that is run repeatedly, the first runs
        if sum(call.q.shape[1] for call in found) == len(rows):  # after an error, some tokens have no call
            by_layer[layer] = found
    return Trace(label, rows, rows if ids is None else ids, by_layer, failure)


def _cache_of_zeros(earlier: Trace, length: int) -> Any:
    """Return a cache of ``length`` keys and values that are 0, with as many and as wide heads as an earlier trace."""
    from transformers import DynamicCache  # an optional package

    cache = DynamicCache()
    for i, (call, *_) in sorted(earlier.calls.items()):
        keys, values = (x.new_zeros(1, len(x), length, x.shape[-1]) for x in (call.k, call.v))
        cache.update(keys, values, i)
    return cache


def _verdict(i: int, layer: Layer, traces: list[Trace], learned: bool) -> Verdict:
    """Compare layer ``i`` with its configuration; ``learned`` is whether the model has learned positions.

    `Verdict.differences` are those of the first text with a difference.
    """
    verdict = Verdict(i, str(layer))
    if i not in traces[0].calls:
        reason = "the forward pass failed, or attention does not use transformers' registry of attention functions"
        verdict.unknown = f"no attention call was recorded: {reason}"
        return verdict
    failed = next((trace for trace in traces if trace.error and i not in trace.calls), None)
    traces = [trace for trace in traces if i in trace.calls]
    notes: list[str] = []
    for trace in traces:
        v = trace.vectors(i, "v")
        v = v / v.abs().max().clamp(min=torch.finfo(v.dtype).tiny)  # all values of a new layer may be 0
        differences = _visibility_differences(i, layer, trace) + _score_differences(layer, trace.calls[i][0])
        if float((v - v[:, :1]).abs().max()) <= SAME:
            description, found, rotation = _compare_rotation(i, layer, trace)
            if rotation and (not verdict.rotation or rotation.positions[-1] > verdict.rotation.positions[-1]):
                verdict.rotation = rotation
            notes = notes or description
            differences += found
        elif learned:
            notes = ["positions are added to the hidden states"]
            distinct = v.mul(1e4).round().unique(dim=1).shape[1]
            if distinct < v.shape[1]:
                differences.append(f"{v.shape[1]} positions have only {distinct} different hidden states")
        else:
            verdict.unknown = "hidden states of a repeated token differ, so that the rotation cannot be measured"
        verdict.differences = verdict.differences or [f"{message} ({trace.label})" for message in differences]
    if verdict.differences and not layer.is_verified:
        first = "; ".join(verdict.differences[:2])
        reason = "probe does not know this family, type of RoPE or strategy"
        verdict.unknown = f"not verified, because {reason}; first differences: {first}"
        verdict.differences = []
    if failed and not verdict.differences:
        verdict.unknown = f"the model cannot read all inputs: {failed.label} ({failed.error})"
        return verdict
    if layer.strategy and not verdict.unknown:
        verdict.unknown = f"{layer.strategy} acts inside the attention function, which probe replaces"
    if verdict.unknown and not notes:
        return verdict
    for trace in traces:
        visible = trace.calls[i][0].visible
        if visible is not None and trace.ids is trace.rows and trace.rows[0] == 0 and len(visible) > len(verdict.seen):
            seen = layer.sees(trace.rows[: len(visible)], torch.arange(visible.shape[1]))
            verdict.seen = [*zip(visible.sum(1).tolist(), seen.sum(1).tolist(), strict=True)]
    calls = [call for trace in traces for call in trace.calls[i]]
    window = max(call.window or 0 if call.visible is None else int(call.visible.sum(1).max()) for call in calls)
    notes += [f"window {window}" if 0 < window <= max(int(trace.rows[-1]) for trace in traces) else "no window"]
    notes += [f"softmax scale {calls[0].scale:.4g}"] + [f"soft cap {cap:g}" for cap in [calls[0].softcap] if cap]
    notes += [name for name in ("sinks", "bias") if any(getattr(call, name) for call in calls)]
    verdict.measured = ", ".join(notes)
    return verdict


def _compare_rotation(i: int, layer: Layer, trace: Trace) -> tuple[list[str], list[str], Rotation | None]:
    """Return descriptions of the rotation in layer ``i``, its differences from the configuration, and that of the keys.

    They are empty if the text follows a cache, because rotations are measured relative to position 0.
    """
    if trace.rows[0] > 0:
        return [], [], None
    rotations: list[Rotation] = []
    found: dict[str, list[str]] = defaultdict(list)  # from each message to ``keys``, ``queries`` or both
    for name, what in (("k", "keys"), ("q", "queries")):
        vectors = trace.vectors(i, name).roll(layer.latent, -1)  # the channels that RoPE rotates come first
        messages, rotation = rotation_differences(vectors, what, trace.rows, trace.ids, layer)
        rotations.append(rotation)
        for message in messages:
            found[message].append(what)
    notes = [_describe(rotations[-1].radians)]
    differences = [f"{' and '.join(names)}: {message}" for message, names in found.items()]
    if layer.rope is not None and (factor := trace.calls[i][0].factor) is not None:
        notes += [f"attention factor {factor:.4g}"] if abs(factor - 1) > SAME else []
        if abs(factor / layer.rope.attention_factor - 1) > SAME:
            differences.append(f"attention factor {factor:.4g}, expected {layer.rope.attention_factor:.4g}")
    return notes, differences, rotations[0]


def _score_differences(layer: Layer, call: Call) -> list[str]:
    """Return differences between what an attention function received for its scores and the configuration."""
    found = []
    if layer.scale is not None and abs(call.scale / layer.scale - 1) > SAME:
        found.append(f"softmax scale {call.scale:.4g}, expected {layer.scale:.4g}")
    if (call.softcap or None) != (layer.softcap or None):
        found.append(f"soft cap {call.softcap or 'none'}, expected {layer.softcap or 'none'}")
    if call.sinks != layer.sinks:
        found.append(f"attention received {'sinks' if call.sinks else 'no sinks'}, expected the opposite")
    return found


def _describe_mixers(model: Any, mixers: set[nn.Module], verdicts: list[Verdict]) -> None:
    """Name the mixers of each layer in its verdict, and report those whose output depends on the cache as faults."""
    names = {module: re.search(r"\.(\d+)\.", name) for name, module in model.named_modules() if module in mixers}
    differences = _cached_differences(model, mixers) if mixers else {}
    for module, index in names.items():
        if index is None or int(index[1]) >= len(verdicts):
            continue
        verdict, class_name = verdicts[int(index[1])], type(module).__name__
        kind = next((kind for words, kind in MIXERS.items() if re.search(words, class_name.lower())), "recurrent layer")
        if verdict.measured:
            verdict.measured += f", measured without the output of its {kind} ({class_name})"
        else:
            verdict.expected, verdict.unknown = kind, f"{class_name} has no queries and keys"
        if (difference := differences.get(module)) is not None and difference > SAME:
            message = f"cached output differs from uncached output by {difference:.2%} of its largest value"
            verdict.differences.append(f"{class_name}: {message}")


def _cached_differences(model: Any, mixers: set[nn.Module]) -> dict[nn.Module, float]:
    """Return the largest difference of each mixer's output on random tokens, decoded with a cache, and without a cache.

    The difference is relative to the largest entry of the output. The result is empty if the model has no cache.
    """
    tokens = torch.randint(3, model.get_input_embeddings().num_embeddings, (1, SHORT), generator=torch.Generator())
    half = SHORT // 2
    results = []
    with suppress(UserError), torch.inference_mode():  # `measure_invariances` reports errors
        for sizes in (None, [half, *[1] * half]):
            with recorded_outputs(mixers) as outputs:
                read_logits(model, tokens.to(model.device), sizes)
            results.append({module: torch.cat(parts, 1) for module, parts in outputs.items() if parts})
    if len(results) < 2:
        return {}
    whole, cached = results
    return {m: float((cached[m] - x).abs().max() / x.abs().max().clamp(min=1e-30)) for m, x in whole.items()}


def _describe(radians: Tensor) -> str:
    """Describe a rotation by the measured radians per position of its pairs of channels."""
    if not len(radians):
        return "queries are 0"
    low, high = float(radians.abs().min()), float(radians.abs().max())
    if high < 1e-5:
        return "no rotation of queries and keys"
    return f"rotates by {high:.4g} to {low:.4g} radians per position"


def _visibility_differences(i: int, layer: Layer, trace: Trace) -> list[str]:
    """Return at most one message about the keys that the queries of layer ``i`` see.

    The message names the first query that sees other keys than configured. If there is no such query, the message names
    a wrong size of the window among the arguments of the attention function.
    """
    calls = trace.calls[i]
    # if positions have gaps, transformers masks the tokens before a gap, as if another text began after it
    for call, rows in zip(calls, trace.rows.split([call.q.shape[1] for call in calls]), strict=True):
        if call.visible is None or trace.ids is not trace.rows:
            continue
        end = int(rows[-1]) + 1
        expected = layer.sees(rows, torch.arange(end - call.visible.shape[1], end))
        for row in (call.visible.cpu() != expected).any(1).nonzero()[:1, 0].tolist():
            wanted = int(layer.sees(rows[row : row + 1], torch.arange(end)).sum())
            return [f"query {int(rows[row])} sees {int(call.visible[row].sum())} keys, expected {wanted}"]
    if calls[0].window not in (None, layer.window, layer.chunk):
        return [f"attention received a window of {calls[0].window}, expected {layer.window or layer.chunk}"]
    return []
