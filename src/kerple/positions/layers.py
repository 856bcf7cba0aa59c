"""`Layers`: one strategy with a window in most layers, another without a window in the others."""

from collections.abc import Callable

from kerple.base.errors import UserError
from kerple.positions.absolute import NoPE
from kerple.positions.base import Position, Shape
from kerple.positions.rotary import RoPE
from kerple.positions.wrapper import Wrapper


class Layers(Wrapper):
    """``near`` with a window in all layers but each ``every``-th, which has ``far`` and sees everything.

    With RoPE near and NoPE far it is RNoPE-SWA (Yang et al. 2025, arXiv 2501.18795, section 4) and iRoPE (Llama 4).
    Each layer has an instance of its own.

    Parameters: `0` of its own, those of the strategies in each layer.
    Cost: that of the strategies; attention of the near layers is O(T · window), and so is their cache.

    Args:
        shape: Sizes of the model; ``every`` must divide its layers.
        near: Builder of the strategy of most layers.
        far: Builder of the strategy of layers every, 2 · every, …, counted from 1.
        every: None is 4, or the number of layers where that is smaller.
        window: Keys a query sees in the near layers; None is the training length.

    Raises:
        UserError: If a number is out of range, ``every`` does not divide the layers, or a strategy works through the
            embeddings, which all layers share.
    """

    def __init__(
        self,
        shape: Shape,
        near: Callable[[Shape], Position] = RoPE,
        far: Callable[[Shape], Position] = NoPE,
        every: int | None = None,
        window: int | None = None,
    ) -> None:
        every = min(4, shape.layers) if every is None else every
        if every < 1 or shape.layers % every:
            raise UserError(f"Layers: every: got {every}, expected a divisor of the {shape.layers} layers")
        is_far = (shape.layer + 1) % every == 0
        super().__init__((far if is_far else near)(shape))
        window = shape.length if window is None else window
        self.require(window >= 1, "window", window, "at least 1 key, or none for the training length")
        expected = "a strategy that works in attention, not through the embeddings, which all layers share"
        option = "far" if is_far else "near"
        self.require(not self.position.uses("embed"), option, type(self.position).__name__, expected)
        self.per_layer = self.varies_by_layer = True
        if not is_far:
            self.window = window if self.window is None else min(window, self.window)
