"""`RotaryFrequencies`: the frequencies of RoPE, and their scaling for inputs longer than the training length."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kerple.positions.angles import exact_dtype, frequencies

Scaling = Literal["pi", "ntk", "dynamic_ntk", "yarn", "llama3", "longrope", "proportional"]
AnyScaling = Literal["none", "pi", "ntk", "dynamic_ntk", "yarn", "llama3"]  # in options of pretrained models


@dataclass(frozen=True)
class RotaryFrequencies:
    """Frequencies of RoPE in radians per position, one for each pair of dimensions.

    Args:
        dim: Number of dimensions r. They form r/2 pairs.
        base: Base of the frequency base^(-2i/r) of pair i.
        length: Training length L in tokens, or ``max_positions`` of `RandomizedPositions`.
        scaling: Name of the scaling (see `RoPE`); None for none.
        factor: Scaling factor s.
        beta_fast: With ``yarn`` and ``llama3``, frequencies with at least this many rotations in L tokens are kept.
        beta_slow: With ``yarn`` and ``llama3``, frequencies with at most this many rotations in L tokens are divided by
            s.
        rotated: Number of dimensions whose frequency is not 0, with ``proportional``.
        short_factors: Divisors of the frequencies, (r/2,), for inputs of up to L tokens, with ``longrope``.
        long_factors: Divisors of the frequencies, (r/2,), for longer inputs, with ``longrope``.
        truncate: Whether the two ends of the ramp of ``yarn`` are rounded to integer indices of pairs, as published.
    """

    dim: int
    base: float
    length: int
    scaling: Scaling | None
    factor: float
    beta_fast: float
    beta_slow: float
    rotated: int
    short_factors: list[float] | None
    long_factors: list[float] | None
    truncate: bool = True

    @property
    def attention_factor(self) -> float:
        """Factor of the rotated q and k if the option ``attention_factor`` of `RoPE` is None."""
        if self.scaling == "yarn":
            return 0.1 * math.log(self.factor) + 1
        return math.sqrt(1 + math.log(self.factor) / math.log(self.length)) if self.scaling == "longrope" else 1.0

    def __call__(self, largest: Tensor) -> Tensor:
        """Return the frequencies (r/2,) fp64 for an input with the largest position `TokenPositions.largest`.

        With ``dynamic_ntk`` and ``longrope`` they depend on this position, and have the shape (1, r/2), (B, 1, r/2), or
        (B, T, r/2) with documents.
        """
        r, device, factor = self.dim, largest.device, self.factor
        end = largest[..., None] + 1  # (1, 1), (B, 1, 1) or (B, T, 1)
        if self.scaling == "ntk":
            return frequencies(r, self.base * factor ** (r / (r - 2)), device)
        if self.scaling == "dynamic_ntk":
            ratio = end.clamp(min=self.length).to(exact_dtype(device)) / self.length
            return frequencies(r, self.base * (factor * ratio - (factor - 1)) ** (r / (r - 2)), device)
        unscaled = frequencies(r, self.base, device)
        if self.scaling == "pi":
            return unscaled / factor
        if self.scaling == "proportional":
            return unscaled / factor * (torch.arange(0, r, 2, device=device) < self.rotated)
        if self.scaling == "longrope":
            short, long = unscaled.new_tensor([self.short_factors, self.long_factors])
            return unscaled / torch.where(end > self.length, long, short)
        if self.scaling in ("yarn", "llama3"):
            pairs = torch.arange(r // 2, dtype=torch.float64)
            interpolated = self._yarn_ramp(pairs) if self.scaling == "yarn" else self._llama3_ramp(unscaled)
            return torch.lerp(unscaled, unscaled / factor, interpolated.to(unscaled))
        return unscaled

    def rescaled(self, f: Tensor) -> Tensor:
        """Apply ``pi``, ``ntk``, ``yarn`` or ``llama3`` to frequencies f (r/2,) fp64 of a model that has a scaling.

        ``yarn`` places a pair on its ramp by its number of rotations in L tokens, as the formula of its two ends does.
        """
        if self.scaling == "pi":
            return f / self.factor
        if self.scaling == "ntk":  # the base of pair i, base^(-2i/r), grows by factor^(r/(r-2))
            return f * self.factor ** (-torch.arange(0, self.dim, 2, dtype=f.dtype) / (self.dim - 2))
        pairs = -f.log() * self.dim / (2 * math.log(self.base))  # i of base^(-2i/r), between integers after a scaling
        ramp = self._yarn_ramp(pairs) if self.scaling == "yarn" else self._llama3_ramp(f)
        return torch.lerp(f, f / self.factor, ramp)

    # ramps (r/2,) fp64 are 0 for frequencies that are kept, and 1 for frequencies that are divided by s

    def _yarn_ramp(self, pairs: Tensor) -> Tensor:
        low, high = self._pair(self.beta_fast), self._pair(self.beta_slow)
        low, high = (math.floor(low), math.ceil(high)) if self.truncate else (low, high)
        low, high = max(low, 0), min(high, self.dim - 1)
        span = max(high, low + 0.001) - low  # not 0
        return ((pairs - low) / span).clamp(0, 1)

    def _llama3_ramp(self, unscaled: Tensor) -> Tensor:
        rotations = self.length * unscaled / (2 * math.pi)  # in L tokens
        if self.beta_fast == self.beta_slow:
            return (rotations < self.beta_slow).to(unscaled)
        return ((self.beta_fast - rotations) / (self.beta_fast - self.beta_slow)).clamp(0, 1)

    def _pair(self, rotations: float) -> float:
        """Return the index of the pair with this number of rotations in L tokens; it may be between two integers."""
        return self.dim * math.log(self.length / (rotations * 2 * math.pi)) / (2 * math.log(self.base))
