"""`LayerPattern`: a strategy and a window for each layer, in a repeating pattern of kinds of layers."""

from collections.abc import Mapping, Sequence

from kerple.positions.absolute import NoPE
from kerple.positions.base import Shape, StrategyBuilder
from kerple.positions.rotary import RoPE
from kerple.positions.wrapper import Wrapper


class LayerPattern(Wrapper):
    """A strategy and a window for each kind of layer. Layer i = 0, 1, … is of the kind ``pattern[i % len(pattern)]``.

    Examples: RNoPE-SWA (Yang et al. 2025, arXiv 2501.18795, section 4) repeats three local layers with RoPE and a
    window, and a global layer with NoPE. iRoPE (Llama 4) has chunks of tokens instead of the window. Gemma 3 (arXiv
    2503.19786) repeats five local layers with RoPE of base 10,000, and a global layer with RoPE of base 1,000,000. Each
    layer has its own instance of its strategy.

    Parameters: `0`, and those of the strategies in each layer.
    Cost: that of the strategies. A layer with a window takes O(T · window) time and O(window) cache.

    Args:
        shape: Sizes of the model.
        kinds: Names of the kinds of layers, each with a function that builds the strategy from the shape.
        pattern: Kinds of the first layers, repeated for later layers. The last repetition may be incomplete. None
            repeats all kinds in the order of ``kinds``.
        windows: Number of keys that a query sees, including its own key, by kind of layer. Kinds without an entry have
            no window.

    Raises:
        UserError: If there are no kinds. If the pattern is empty or longer than the number of layers. If ``pattern`` or
            ``windows`` names an unknown kind. If a window is not positive, or a strategy changes the embeddings, which
            all layers share.
    """

    def __init__(
        self,
        shape: Shape,
        kinds: Mapping[str, StrategyBuilder] = {"local": RoPE, "global": NoPE},
        pattern: Sequence[str] | None = None,
        windows: Mapping[str, int | None] = {},
    ) -> None:
        self.require(bool(kinds), "kinds", "none", "a strategy for at least one kind of layer")
        if pattern is not None:
            expected = f"1 to {shape.layers}, the number of layers"
            self.require(1 <= len(pattern) <= shape.layers, "pattern", f"{len(pattern)} kinds", expected)
        pattern = list(kinds) if pattern is None else pattern
        for option, names in (("pattern", pattern), ("windows", windows)):
            for name in names:
                self.require(name in kinds, option, name, f"one of {', '.join(kinds)}")
        kind = pattern[shape.layer % len(pattern)]
        super().__init__(kinds[kind](shape))
        self.kind = kind
        expected = "a strategy that does not change the embeddings, which all layers share"
        self.require(not self.position.uses("embed"), f"kinds: {kind}", type(self.position).__name__, expected)
        self.per_layer = self.varies_by_layer = True
        if (window := windows.get(kind)) is not None:
            self.require(window >= 1, f"windows: {kind}", window, "at least 1 key; omit the kind for no window")
            self.window = window if self.window is None else min(window, self.window)
