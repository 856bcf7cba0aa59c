"""Tests of invariances: shift, prefix, cache, padding, packing, batch and attention kernel must not change logits."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kerple.base.errors import UserError, describe, require
from kerple.hf.position_limit import learned_positions, leaves_out_positions, longest_input
from kerple.hf.windowed_attention import decoder
from kerple.model import Transformer
from kerple.probe.capture import find_mixers
from kerple.probe.configured_positions import configured_layers
from kerple.probe.reading import EXTRA, Reading, read_logits

LENGTH = 48  # number of tokens of the tested input, without padding
IGNORED = "transformers ignores packed position_ids while use_cache is true, its default; pass use_cache=False"
ALLOWED = 20  # allowed difference of logits, as a multiple of their change by rounding errors of the embeddings


@dataclass(frozen=True)
class Invariance:
    """Result of the test of one invariance.

    Args:
        name: Name of the test.
        difference: Largest absolute difference of logits that should be equal. It is inf if the model raised an
            error, and None if the model does not support the test.
        allowed: Largest difference that is attributed to rounding.
        by_design: Part of the design of the family or strategy that breaks the invariance, or None.
        reason: Type and first line of the error, if there was one; otherwise None.
    """

    name: str
    difference: float | None
    allowed: float
    by_design: str | None = None
    reason: str | None = None

    @property
    def verdict(self) -> str:
        """``holds``, ``broken by design``, ``broken`` or ``not tested``."""
        if self.difference is None:
            return "not tested"
        if self.difference <= self.allowed:
            return "holds"
        return "broken by design" if self.by_design else "broken"


@torch.inference_mode()
def measure_invariances(model: Any, config: Any) -> list[Invariance]:
    """Test all invariances on random tokens, and return the results.

    Args:
        model: A `transformers.PreTrainedModel` in evaluation mode and fp32.
        config: The configuration of its text model.

    Raises:
        UserError: If the model raises an error, or its logits are not finite.
    """
    limit = longest_input(model)
    length = LENGTH if limit is None else max(2, min(LENGTH, limit - EXTRA))
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().num_embeddings
    first = min(3, vocabulary - 1)
    tokens = torch.randint(first, vocabulary, (1, length), generator=generator).to(model.device)
    expected = read_logits(model, tokens)
    if not expected.isfinite().all():
        raise UserError("model: its logits are not finite; check its weights and config.json for NaN")
    allowed = ALLOWED * _rounding(model, tokens, expected)
    shift_reason, length_reason, packing_reason = _by_design(model, config)
    own = model.config._attn_implementation
    other = "sdpa" if own == "eager" else "eager"
    tests: dict[str, tuple[Reading, str | None]] = {
        f"shift by {EXTRA} positions": (Reading(shift=EXTRA), shift_reason),
        "logits of a prefix": (Reading(continued=True), length_reason),
        "cached against uncached": (Reading(cached=True, decoded=0), length_reason),
        "prefill against decoding": (Reading(cached=True, decoded=length), length_reason),
        "padding on the left": (Reading(padding="left"), shift_reason or length_reason),
        "padding on the right": (Reading(padding="right"), length_reason),
        "batch against single": (Reading(batched=True), None),
        "sdpa against eager attention": (Reading(attention=other), None),
        f"packed documents, {own} attention": (Reading(packed=True), packing_reason),
        f"packed documents, {other} attention": (Reading(packed=True, attention=other), packing_reason),
        "packed documents with use_cache": (Reading(packed=True, cached=True), packing_reason or IGNORED),
    }
    results = []
    for name, (reading, by_design) in tests.items():
        try:
            reading.check(model)
            logits = reading.logits(model, tokens)
            given, wanted = (f"{[*x.shape]}" for x in (logits, expected))
            require(given == wanted, "model", f"logits of shape {given}", wanted)
            difference = float((logits.double() - expected.double()).abs().max())
            results.append(Invariance(name, difference, allowed, by_design))
        except UserError as error:
            cause = error.__cause__ or error
            # with the other classes, models fail, for example because shapes do not fit
            unsupported = isinstance(cause, ValueError | NotImplementedError | ImportError)
            results.append(Invariance(name, None if unsupported else math.inf, allowed, reason=describe(cause)))
    return results


def _rounding(model: Any, tokens: Tensor, logits: Tensor) -> float:
    """Return the largest change of the logits if each entry of the embeddings changes by a rounding error of fp32.

    It is at least the rounding error of the largest logit.
    """
    generator = torch.Generator().manual_seed(1)

    def perturb(module: Any, args: Any, output: Tensor) -> Tensor:
        return output * (1 + 2**-23 * torch.randn(output.shape, generator=generator).to(output))

    with model.get_input_embeddings().register_forward_hook(perturb):
        changed = float((read_logits(model, tokens).double() - logits.double()).abs().max())
    return max(changed, 2**-23 * float(logits.abs().max()))


def _by_design(model: Any, config: Any) -> tuple[str | None, str | None, str | None]:
    """Return the reasons why, by design, a shift of positions, a longer input and another document change logits.

    A reason is None if logits should not change.
    """
    network = getattr(model, "network", None)
    retrofit = getattr(decoder(model), "kerple", None)  # the strategies of `kerple.hf.retrofit`
    positions = network.positions if isinstance(network, Transformer) else retrofit.positions if retrofit else ()
    shift_reason = None if all(p.shift_invariant for p in positions) else "not a shift-invariant strategy"
    consistent = all(p.prefix_consistent for p in positions)
    length_reason = None if consistent else "a strategy that depends on the length of the input"
    if isinstance(network, Transformer):
        return shift_reason, length_reason, length_reason
    layers = configured_layers(config)
    scalings = {layer.rope.frequencies.scaling for layer in layers if layer.rope}
    length_reason = length_reason or next((s for s in ("dynamic_ntk", "longrope") if s in scalings), None)
    if learned_positions(model) is not None and not leaves_out_positions(model):
        shift_reason = "absolute positions"
    if any(layer.temperature for layer in layers):
        shift_reason = "a temperature that grows with the position"
    if any(layer.chunk for layer in layers):
        shift_reason = "chunks"
    # these count tokens of the row, not of a document
    rows = any(layer.chunk or (layer.temperature and layer.temperature.rule == "llama4") for layer in layers)
    packing_reason = "recurrent layers continue from one document to the next" if find_mixers(model) else None
    packing_reason = packing_reason or length_reason or (shift_reason if rows else None)
    if not all(layer.is_verified for layer in layers):
        assumed = "assumed, because probe does not know this family or type of RoPE"
        shift_reason, packing_reason = shift_reason or assumed, packing_reason or assumed
    return shift_reason or length_reason, length_reason, packing_reason
