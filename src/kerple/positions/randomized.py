"""Training on positions drawn from a range as long as the inputs to come."""

from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b

import torch
from torch import Tensor

from kerple.errors import UserError
from kerple.positions.base import Position, Shape
from kerple.positions.products import precise, product
from kerple.positions.relative import TransformerXL
from kerple.positions.rotary import RoPE


class RandomizedPositions(Position):
    """Ordered random positions while training, plain ones in evaluation (Ruoss et al. 2023, arXiv 2305.16843, § 3).

    In training, token t of an input stands at the t-th of L positions drawn without repetition from 0..reach-1 and
    sorted; L is the training length. A shorter input takes the first of them, tokens from L on repeat the gaps one
    reach further. All inputs of a step share the draw, as in the published code. In evaluation token t stands at t.

    The draw is a function of ``seed`` and of the number of optimiser steps taken, a buffer of the checkpoint: it is
    the same on every device, and after resuming.

    Parameters: `0` of its own, those of the wrapped strategy.
    Cost: that of the wrapped strategy; in training a table of distances is gathered, not streamed: T × T entries.

    Args:
        shape: What the model hands to every strategy.
        position: Builder of the wrapped strategy, given the shape with ``reach`` as its length.
        reach: Positions to draw from; None is 32 times the training length. At least the longest input to be tested.
        seed: Of the draws.

    Raises:
        UserError: If ``reach`` is shorter than the training length.
    """

    step: Tensor
    drawn: Tensor

    def __init__(
        self,
        shape: Shape,
        position: Callable[[Shape], Position] = RoPE,
        reach: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.reach = 32 * shape.length if reach is None else reach
        if self.reach < shape.length:
            raise UserError(
                f"RandomizedPositions: reach: got {reach}, expected at least the training length {shape.length}; "
                "choose the longest input to be tested"
            )
        self.seed, self.length = seed, shape.length
        self.position = position(replace(shape, length=self.reach))
        for module in self.position.modules():
            if isinstance(module, TransformerXL):
                module.contiguous = False
        self.shift_invariant = self.position.shift_invariant
        self.prefix_consistent = self.position.prefix_consistent
        self.share_across_layers = self.position.share_across_layers
        self.max_length = self.position.max_length
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("drawn", torch.zeros(shape.length, dtype=torch.int64))
        self._draw()

    def uses(self, hook: str) -> bool:
        inner = self.position.uses(hook)
        if not self.training or hook not in ("bias", "weight", "scores"):
            return inner
        return hook == "scores" and any(self.position.uses(h) for h in ("bias", "weight", "scores"))

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.position.embed(x, self._places(positions))

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.position.rotate(q, k, self._places(positions))

    def bias(self, length: int) -> Tensor | None:
        return None if self.training else self.position.bias(length)

    def weight(self, length: int) -> Tensor | None:
        return None if self.training else self.position.weight(length)

    def content(self, x: Tensor) -> Tensor | None:
        return self.position.content(x)

    def scores(
        self, q: Tensor, k: Tensor, query_positions: Tensor, key_positions: Tensor, content: Tensor | None
    ) -> Tensor:
        query_places, key_places = self._places(query_positions), self._places(key_positions)
        inner = self.position
        total = torch.zeros((), dtype=precise(q).dtype, device=q.device)
        if inner.uses("scores"):
            total = total + inner.scores(q, k, query_places, key_places, content)
        if not self.training:
            return total
        distance = (query_places[:, None] - key_places).clamp(min=0)  # (Tq, Tk)
        length = (len(key_positions) // self.length + 2) * self.reach
        if (table := inner.bias(length)) is not None:
            total = total + table[:, distance]  # (1 or B, H, Tq, Tk)
        if (weight := inner.weight(length)) is not None:
            plain = product(q, k.mT) * q.shape[-1] ** -0.5  # (B, H, Tq, Tk)
            total = total + plain * (weight[:, distance] - 1)  # the attention adds plain itself
        return total

    def values(self, attention: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        return self.position.values(attention, self._places(query_positions), self._places(key_positions))

    @torch.no_grad()
    def constrain_(self) -> None:
        self.position.constrain_()
        self.step += 1
        self._draw()

    def _draw(self) -> None:
        if self.drawn.is_meta:
            return
        # hashed, because torch's generator only reads 32 bits of its seed: no shift keeps seed and step apart
        digest = blake2b(f"{self.seed}/{int(self.step)}".encode(), digest_size=4).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        self.drawn.copy_(torch.randperm(self.reach, generator=generator)[: self.length].sort().values)

    def _places(self, positions: Tensor) -> Tensor:
        if not self.training:
            return positions
        return self.drawn[positions % self.length] + positions // self.length * self.reach  # same shape
