"""What the forward pass does with positions, measured at the attention call of each layer."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kerple.hf.adapter import forget_length, learned_positions
from kerple.hf.modeling import CACHE
from kerple.model import Transformer
from kerple.probe import rotation
from kerple.probe.capture import Call, captured
from kerple.probe.expected import Layer, layers, original_length, our_layers

SHORT = 32  # tokens of the short pass
DECODED = 4  # tokens that are decoded one by one
LONGEST = 1040  # a window up to here is measured in one pass
SAME = 1e-3  # largest relative difference of values that should be equal


@dataclass
class Pass:
    """The calls of one forward pass, or of one text read in several.

    Args:
        label: Name in messages.
        rows: Numbers of the tokens in the input, (T,) int64.
        ids: Their positions, (T,) int64.
        calls: The calls of each layer, in order.
    """

    label: str
    rows: Tensor
    ids: Tensor
    calls: dict[int, list[Call]]


@dataclass
class Verdict:
    """What is said and measured of one layer.

    Args:
        layer: Number of the layer.
        expected: What the configuration says.
        measured: What the forward pass does.
        differences: Where the two differ; none if they agree.
        unknown: Why something was not measured or not judged, or None.
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
    expected = our_layers(model.network) if ours else layers(config)
    learned = learned_positions(model) is not None
    if getattr(config, "kv_lora_rank", None):
        return [
            Verdict(i, str(layer), unknown="latent attention (MLA) has no plain queries and keys")
            for i, layer in enumerate(expected)
        ]
    passes = _passes(model, config, expected, learned, ours)
    return [_compare(i, layer, passes, learned) for i, layer in enumerate(expected)]


def _passes(model: Any, config: Any, expected: list[Layer], learned: bool, ours: bool) -> list[Pass]:
    length, longest = original_length(config), getattr(config, "max_position_embeddings", None)
    limit = length or SHORT
    token = _token(model, config)
    short = min(SHORT, limit)
    windows = [w for layer in expected if (w := layer.window or layer.chunk) and w + 3 <= LONGEST]
    found = [_read(model, token, short, "a short text")]
    reach = max([short, *(w + 3 for w in windows)])
    if reach > short and not (learned and reach > limit):
        found.append(_read(model, token, reach, f"{reach} tokens"))
    grows = max((layer.frequencies.factor for layer in expected if layer.frequencies), default=1.0)
    if longest and not learned and not ours:
        longest = int(longest * grows) if longest == length else longest
        ids = sorted({0, *(1 << k for k in range(40) if 1 << k < longest), longest - 1})
        found.append(_read(model, token, len(ids), f"positions up to {longest - 1}", torch.tensor(ids)))
    found.append(_decode(model, token, max(1, min(SHORT, limit) // 2)))
    return found


def _token(model: Any, config: Any) -> int:
    """A token whose embedding is not 0, as that of padding may be."""
    weight = model.get_input_embeddings().weight
    size = weight[: min(len(weight), 1000)].float().norm(dim=-1)
    size[[t for t in (getattr(config, "pad_token_id", None),) if t is not None and 0 <= t < len(size)]] = 0
    return int(size.argmax())


def _read(model: Any, token: int, length: int, label: str, ids: Tensor | None = None) -> Pass:
    tokens, rows = torch.full((1, length), token, device=model.device), torch.arange(length)
    options = {} if ids is None else {"position_ids": ids[None].to(model.device)}
    forget_length(model)
    with captured(model) as calls:
        model(input_ids=tokens, use_cache=False, **options)
    return Pass(label, rows, rows if ids is None else ids, _by_layer(calls))


def _decode(model: Any, token: int, length: int) -> Pass:
    cache: Any = None
    forget_length(model)
    with captured(model) as calls:
        for tokens in (length, *[1] * DECODED):
            inputs = {"input_ids": torch.full((1, tokens), token, device=model.device), "use_cache": True}
            output = model(**inputs, **({} if cache is None else {CACHE: cache}))
            cache = output.get(CACHE)
            if cache is None:
                break
    rows = torch.arange(length + DECODED)
    return Pass("decoding", rows, rows, {} if cache is None else _by_layer(calls))


def _by_layer(calls: list[Call]) -> dict[int, list[Call]]:
    found: dict[int, list[Call]] = defaultdict(list)
    for call in calls:
        found[call.layer].append(call)
    return found


def _compare(i: int, layer: Layer, passes: list[Pass], learned: bool) -> Verdict:
    verdict = Verdict(i, str(layer))
    if i not in passes[0].calls:
        verdict.unknown = "its attention is not called through transformers' registry of attention functions"
        return verdict
    notes: list[str] = []
    for p in passes:
        if not (calls := p.calls.get(i)):
            continue
        own = [slice(-call.q.shape[1], None) for call in calls]
        q = torch.cat([call.q for call in calls], 1)
        k, v = (torch.cat([getattr(c, n)[:, s] for c, s in zip(calls, own, strict=True)], 1) for n in "kv")
        new = _visible(calls, p, layer)
        change = float((v - v[:, :1]).abs().max() / v.abs().max())
        if change > SAME:
            if learned:
                notes = ["positions are added to the hidden states"]
                new += _repeated(v, p)
            else:
                verdict.unknown = "hidden states of equal tokens differ, so that the rotation cannot be separated"
        else:
            for x, what in ((q, "queries"), (k, "keys")):
                messages, found = rotation.differences(x, what, p.rows, p.ids, layer)
                new += messages
            if p is passes[0]:
                notes = [_describe(found, layer)]
            factor = calls[0].factor
            if factor is not None and layer.frequencies is not None:
                notes += [f"attention factor {factor:.4g}"] if p is passes[0] and abs(factor - 1) > 1e-4 else []
                if abs(factor / layer.attention_factor - 1) > SAME:
                    new.append(f"attention factor {factor:.4g}, expected {layer.attention_factor:.4g}")
        verdict.differences += [f"{message} ({p.label})" for message in new]
    calls = [call for p in passes for call in p.calls.get(i, [])]
    if seen := [int(call.seen.sum(1).max()) for call in calls if call.seen is not None]:
        longest = max(len(p.rows) for p in passes)
        notes.append(f"window {max(seen)}" if max(seen) < longest else "no window in the texts read")
    notes += ["sinks"] if any(call.sinks for call in calls) else []
    notes += ["a bias of the scores"] if any(call.bias for call in calls) else []
    verdict.measured = ", ".join(notes)
    if verdict.differences and not layer.judged:
        verdict.unknown = f"not judged, as {layer.kind} is not understood: {'; '.join(verdict.differences[:2])}"
        verdict.differences = []
    return verdict


def _describe(found: rotation.Rotation, layer: Layer) -> str:
    frequencies = found.frequencies
    if float(frequencies.abs().max()) < 1e-5:
        return "no rotation: the order of tokens does not matter"
    fast, slow = float(frequencies.abs().max()), float(frequencies.abs().min())
    return f"rotates {2 * len(frequencies)} channels by {fast:.4g} to {slow:.4g} radians per position"


def _visible(calls: list[Call], p: Pass, layer: Layer) -> list[str]:
    """What the mask of some calls shows that the configuration does not say."""
    begin = 0
    for call in calls:
        rows = p.rows[begin : begin + call.q.shape[1]]
        begin += len(rows)
        if call.seen is None or (p.ids != p.rows).any():
            continue
        keys = torch.arange(begin - call.seen.shape[1], begin)
        wrong = (call.seen.cpu() != layer.sees(rows, keys)).any(1)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            number = int(layer.sees(rows[row : row + 1], torch.arange(begin)).sum())
            got = int(call.seen[row].sum())
            return [f"mask: query {int(rows[row])} sees {got} keys, expected {number}" + " others" * (got == number)]
    if calls[0].window not in (None, layer.window, layer.chunk):
        return [f"attention received a window of {calls[0].window}, expected {layer.window}"]
    return []


def _repeated(v: Tensor, p: Pass) -> list[str]:
    """Whether two positions have the same hidden states in a model that adds positions to them."""
    flat = v.transpose(0, 1).flatten(1)
    near = torch.cdist(flat.double(), flat.double()).fill_diagonal_(torch.inf)
    if float(near.min()) > 1e-5 * float(flat.norm(dim=-1).max()):
        return []
    a, b = divmod(int(near.argmin()), len(flat))
    return [f"positions {int(p.ids[min(a, b)])} and {int(p.ids[max(a, b)])} have the same hidden states"]
