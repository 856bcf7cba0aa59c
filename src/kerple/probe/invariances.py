"""Tests of invariances: shift, prefix, cache, padding, batch and implementation of attention must not change logits."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kerple.base.errors import UserError, describe
from kerple.hf.adapter import reset_dynamic_rope
from kerple.hf.foreign_errors import foreign_errors
from kerple.hf.position_limit import learned_positions, longest_input
from kerple.hf.windowed_attention import attention_replaced
from kerple.model import Transformer
from kerple.probe.configured_positions import configured_layers

LENGTH = 48  # number of tokens of the tested input, without padding
SHIFT = 16  # number of positions of the shift, and number of padding tokens
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
    length = LENGTH if limit is None else max(2, min(LENGTH, limit - SHIFT))
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().num_embeddings
    tokens = torch.randint(min(3, vocabulary - 1), vocabulary, (3, length), generator=generator).to(model.device)
    single = tokens[:1]
    half = length // 2
    one_by_one = [half, *[1] * (length - half)]  # numbers of tokens of each forward pass
    expected = read_logits(model, single)
    if not expected.isfinite().all():
        raise UserError("model: its logits are not finite; check its weights and config.json for NaN")
    allowed = ALLOWED * _rounding(model, single, expected)
    shift_reason, length_reason = _by_design(model, config)

    def padded(left: bool) -> Tensor:
        padding = tokens[1:2, :SHIFT]
        padded_tokens = torch.cat((padding, single) if left else (single, padding), 1)
        mask = F.pad(torch.ones_like(single), (SHIFT, 0) if left else (0, SHIFT))
        return read_logits(model, padded_tokens, attention_mask=mask)[mask.bool()][None]

    def shifted() -> Tensor:
        if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
            raise UserError("the model takes no position_ids")
        return read_logits(model, single, position_ids=torch.arange(SHIFT, SHIFT + length, device=model.device)[None])

    def other_attention() -> Tensor:
        if not getattr(model, "_supports_sdpa", False):
            raise UserError("the model has no sdpa attention")
        with attention_replaced(model, "eager" if model.config._attn_implementation != "eager" else "sdpa"):
            return read_logits(model, single)

    tests: dict[str, tuple[Callable[[], Tensor], Tensor, str | None]] = {
        f"shift by {SHIFT} positions": (shifted, expected, shift_reason),
        "logits of a prefix": (lambda: read_logits(model, single[:, :half]), expected[:, :half], length_reason),
        "cached against uncached": (lambda: read_logits(model, single, [half, length - half]), expected, length_reason),
        "prefill against decoding": (lambda: read_logits(model, single, one_by_one), expected, length_reason),
        "padding on the left": (lambda: padded(True), expected, shift_reason or length_reason),
        "padding on the right": (lambda: padded(False), expected, length_reason),
        "batch against single": (lambda: read_logits(model, tokens)[:1], expected, None),
        "sdpa against eager attention": (other_attention, expected, None),
    }
    return [_test(name, *test, allowed=allowed) for name, test in tests.items()]


def _test(name: str, run: Callable[[], Tensor], expected: Tensor, by_design: str | None, allowed: float) -> Invariance:
    try:
        difference = float((run().double() - expected.double()).abs().max())
    except UserError as error:
        cause = error.__cause__ or error
        # with the other classes, models fail, for example because shapes do not fit
        unsupported = isinstance(cause, ValueError | NotImplementedError | ImportError)
        return Invariance(name, None if unsupported else math.inf, allowed, reason=describe(cause))
    return Invariance(name, difference, allowed, by_design)


def read_logits(
    model: Any, tokens: Tensor, sizes: list[int] | None = None, cache: Any = None, **options: Any
) -> Tensor:
    """Return the logits of tokens, (B, T, V).

    Args:
        model: A `transformers.PreTrainedModel`.
        tokens: The tokens, (B, T) int64.
        sizes: Numbers of tokens of the parts that are read one after the other with a cache; None to read all tokens
            in one forward pass without a cache.
        cache: Cache of tokens before these, or None.
        **options: Further arguments of each forward pass.

    Raises:
        UserError: If the model raises an error, or ``sizes`` is given and the model returns no cache.
    """
    reset_dynamic_rope(model)
    if sizes is None:
        with foreign_errors("model: it cannot read a short text", "use another model"):
            return model(input_ids=tokens, use_cache=False, **options).logits
    logits = []
    for part in tokens.split(sizes, 1):
        options |= {} if cache is None else {"cache": cache}
        with foreign_errors("model: it cannot read a short text with a cache", "use another model"):
            output = model(input_ids=part, use_cache=True, **options)
            logits.append(output.logits)
        if (cache := output.get("cache")) is None:
            raise UserError("the model has no cache")
    return torch.cat(logits, 1)


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


def _by_design(model: Any, config: Any) -> tuple[str | None, str | None]:
    """Return the reasons why, by design, a shift of positions and a longer input change logits.

    The first reason is for the shift, and the second for the length. A reason is None if logits should not change.
    """
    if isinstance(network := getattr(model, "network", None), Transformer):
        shift_reason = None if all(p.shift_invariant for p in network.positions) else "not a shift-invariant strategy"
        return shift_reason, None if network.prefix_consistent else "a strategy that depends on the length of the input"
    layers = configured_layers(config)
    scalings = {layer.rope.frequencies.scaling for layer in layers if layer.rope}
    length_reason = next((s for s in ("dynamic_ntk", "longrope") if s in scalings), None)
    shift_reason = "absolute positions" if learned_positions(model) is not None else None
    if any(layer.temperature for layer in layers):
        shift_reason = "a temperature that grows with the position"
    if any(layer.chunk for layer in layers):
        shift_reason = "chunks"
    if not all(layer.is_verified for layer in layers):
        shift_reason = shift_reason or "assumed, because probe does not know this family or type of RoPE"
    return shift_reason or length_reason, length_reason
