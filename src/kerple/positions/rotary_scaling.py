"""Frequencies of RoPE, and their scaling (PI, NTK, YaRN) for inputs longer than those of training."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kerple.positions.angles import exact, frequencies

Scaling = Literal["pi", "ntk", "dynamic_ntk", "yarn"]


@dataclass(frozen=True)
class Turns:
    """Radians per position of each pair of dimensions that RoPE turns; the options are RoPE's.

    Args:
        turned: r, how many dimensions turn.
        base: Base of the angles base^(-2i/r).
        length: L, the training length.
        scaling: None, or the rule.
        factor: s, how many times L is to be reached.
        fast: Turns in L from which ``yarn`` keeps an angle.
        slow: Turns in L up to which ``yarn`` divides an angle by s.
    """

    turned: int
    base: float
    length: int
    scaling: Scaling | None
    factor: float | None
    fast: float
    slow: float

    @property
    def size(self) -> float:
        """Factor of q and k, which YaRN makes larger than 1."""
        return 0.1 * math.log(self.factor or 1.0) + 1 if self.scaling == "yarn" else 1.0

    def __call__(self, positions: Tensor) -> Tensor:
        """Compute radians per position, (r/2,) or ((B,) 1, r/2) fp64, for an input with these positions ((B,) T)."""
        r, device, factor = self.turned, positions.device, self.factor or 1.0
        if self.scaling == "ntk":
            return frequencies(r, self.base * factor ** (r / (r - 2)), device)
        if self.scaling == "dynamic_ntk":
            end = positions.amax(-1, keepdim=True)[..., None] + 1  # ((B,) 1, 1)
            ratio = end.clamp(min=self.length).to(exact(device)) / self.length
            return frequencies(r, self.base * (factor * ratio - (factor - 1)) ** (r / (r - 2)), device)
        unscaled = frequencies(r, self.base, device)
        if self.scaling == "pi":
            return unscaled / factor
        if self.scaling == "yarn":
            return torch.lerp(unscaled, unscaled / factor, self._ramp().to(unscaled))
        return unscaled

    def _ramp(self) -> Tensor:
        # YaRN's weight of each pair, from 0 (its angle is kept) to 1 (its angle is divided by s), (r/2,) fp64
        low = max(math.floor(self._pair(self.fast)), 0)
        high = min(math.ceil(self._pair(self.slow)), self.turned - 1)
        span = max(high, low + 0.001) - low
        return ((torch.arange(self.turned // 2, dtype=torch.float64) - low) / span).clamp(0, 1)

    def _pair(self, turns: float) -> float:
        # index of the pair, interpolated, that turns so often within the training length
        return self.turned * math.log(self.length / (turns * 2 * math.pi)) / (2 * math.log(self.base))
