"""Tests of invariances of the logits: shift, prefix, cache, padding, batch and implementation of attention."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kerple.base.errors import UserError
from kerple.hf.adapter import learned_positions, reset_dynamic_rope
from kerple.hf.modeling import CACHE
from kerple.hf.windows import attention_replaced
from kerple.model import Transformer
from kerple.probe.expected import configured_layers, original_length

LENGTH = 48  # tokens of a text
SHIFT = 16  # positions of a shift, and tokens of padding
ALLOWED = 20  # allowed difference, as a multiple of the effect of rounding the embeddings


@dataclass(frozen=True)
class Invariance:
    """The test of one invariance.

    Args:
        name: Name of the property.
        difference: Largest absolute difference of logits that should be equal; inf if the model raised an error, None
            if it does not support the test.
        allowed: Largest difference that rounding explains.
        by_design: Part of the family's design that breaks the invariance, or None.
        reason: First line of the error that the model raised, or None.
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
    """Test every invariance on random tokens.

    Args:
        model: A `transformers.PreTrainedModel` in evaluation mode and fp32.
        config: The configuration of its text model.
    """
    limit = original_length(config) if learned_positions(model) is not None else None
    length = LENGTH if limit is None else max(2, min(LENGTH, limit - SHIFT))
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().num_embeddings
    tokens = torch.randint(min(3, vocabulary - 1), vocabulary, (3, length), generator=generator).to(model.device)
    one, half = tokens[:1], length // 2
    whole = _logits(model, one)
    rounding = ALLOWED * _rounding(model, one, whole)
    shifts, grows = _by_design(model, config)

    def padded(left: bool) -> Tensor:
        filler = tokens[1:2, :SHIFT]
        parts = (filler, one) if left else (one, filler)
        mask = torch.ones(1, length + SHIFT, dtype=torch.long, device=model.device)
        mask[:, slice(SHIFT) if left else slice(length, None)] = 0
        logits = _logits(model, torch.cat(parts, 1), attention_mask=mask)
        return logits[:, SHIFT:] if left else logits[:, :length]

    def moved() -> Tensor:
        if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
            raise UserError("the model takes no position_ids")
        return _logits(model, one, position_ids=torch.arange(SHIFT, SHIFT + length, device=model.device)[None])

    def eager() -> Tensor:
        if not getattr(model, "_supports_sdpa", False):
            raise UserError("the family has no sdpa attention")
        with attention_replaced(model, "eager" if model.config._attn_implementation != "eager" else "sdpa"):
            return _logits(model, one)

    tests: dict[str, tuple[Callable[[], Tensor], Tensor, str | None]] = {
        f"shift by {SHIFT} positions": (moved, whole, shifts),
        "logits of a prefix": (lambda: _logits(model, one[:, :half]), whole[:, :half], grows),
        "cached against uncached": (lambda: _cached(model, one, [half, length - half]), whole, grows),
        "prefill against decoding": (lambda: _cached(model, one, [half, *[1] * (length - half)]), whole, grows),
        "padding on the left": (lambda: padded(True), whole, shifts or grows),
        "padding on the right": (lambda: padded(False), whole, grows),
        "batch against single": (lambda: _logits(model, tokens)[:1], whole, None),
        "sdpa against eager attention": (eager, whole, None),
    }
    return [_test(name, *test, allowed=rounding) for name, test in tests.items()]


def _test(name: str, run: Callable[[], Tensor], expected: Tensor, by_design: str | None, allowed: float) -> Invariance:
    try:
        difference = float((run().double() - expected.double()).abs().max())
    except (UserError, ValueError, NotImplementedError, ImportError) as error:  # the model does not support it
        return Invariance(name, None, allowed, reason=str(error).splitlines()[0])
    except RuntimeError as error:  # shapes do not fit
        return Invariance(name, math.inf, allowed, reason=str(error).splitlines()[0])
    return Invariance(name, difference, allowed, by_design)


def _logits(model: Any, tokens: Tensor, **options: Any) -> Tensor:
    reset_dynamic_rope(model)
    return model(input_ids=tokens, use_cache=False, **options).logits


def _cached(model: Any, tokens: Tensor, sizes: list[int]) -> Tensor:
    reset_dynamic_rope(model)
    cache, parts = None, []
    for part in tokens.split(sizes, 1):
        output = model(input_ids=part, use_cache=True, **({} if cache is None else {CACHE: cache}))
        cache = output.get(CACHE)
        if cache is None:
            raise UserError("the model has no cache")
        parts.append(output.logits)
    return torch.cat(parts, 1)


def _rounding(model: Any, tokens: Tensor, logits: Tensor) -> float:
    """Largest change of the logits if each entry of the embeddings is changed by a rounding error of fp32."""
    generator = torch.Generator().manual_seed(1)

    def perturb(module: Any, args: Any, output: Tensor) -> Tensor:
        return output * (1 + 2**-23 * torch.randn(output.shape, generator=generator).to(output))

    hook = model.get_input_embeddings().register_forward_hook(perturb)
    try:
        changed = float((_logits(model, tokens).double() - logits.double()).abs().max())
    finally:
        hook.remove()
    return max(changed, 2**-23 * float(logits.abs().max()))


def _by_design(model: Any, config: Any) -> tuple[str | None, str | None]:
    """Two reasons, each a part of the design or None: why a shift and why the input length may change the logits."""
    if isinstance(network := getattr(model, "network", None), Transformer):
        shifts = None if all(p.shift_invariant for p in network.positions) else "its strategy"
        return shifts, None if network.prefix_consistent else "its strategy"
    said = configured_layers(config)
    scalings = {layer.frequencies.scaling for layer in said if layer.frequencies}
    grows = next((s for s in ("dynamic_ntk", "longrope") if s in scalings), None)
    shifts = "absolute positions" if learned_positions(model) is not None else None
    if any(layer.temperature for layer in said):
        shifts = "a temperature that grows with the position"
    if any(layer.chunk for layer in said):
        shifts = "chunks"
    if not all(layer.judged for layer in said):
        shifts = shifts or "perhaps, because the family is not known"
    return shifts or grows, grows
