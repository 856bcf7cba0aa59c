"""Scores that a small network corrects, given the scores of all heads and a bias by distance."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kerple.positions.base import Position, Shape, is_distance_bias
from kerple.positions.kerple import KerpleLog
from kerple.positions.pair_network import pair_network
from kerple.positions.products import product
from kerple.positions.token_positions import QueryKeyBlock


class DAPE(Position):
    """``s + b + W_2·LeakyReLU(W_1·[s; b])`` for each pair of query and key, over the heads (Zheng et al. 2024, arXiv
    2405.14722, section 3.2).

    s are the scaled scores of the H heads, b is the bias of another strategy at the pair's distance. The network sees
    heads, not positions.

    Parameters: `2 * H + 3 * H * hidden + hidden` with the default bias, one set per layer unless said otherwise.
    Cost: explicit scores, and ``hidden`` numbers for each.

    Args:
        shape: Sizes of the model.
        over: Builder of the strategy whose bias b is, given the shape.
        hidden: Width of the network.

    Raises:
        UserError: If the width is not positive, or the other strategy is not a bias by distance alone.
    """

    shift_invariant = True
    per_layer = True
    taps = 1
    """How many neighbouring keys each of the two layers of the network reads."""

    def __init__(self, shape: Shape, over: Callable[[Shape], Position] = KerpleLog, hidden: int = 32) -> None:
        super().__init__()
        self.require(hidden >= 1, "hidden", hidden, "a positive width; the paper uses 32")
        self.over = over(shape)
        expected = "a strategy that is a bias by distance and nothing else, such as KerpleLog, ALiBi or T5"
        self.require(is_distance_bias(self.over), "over", type(self.over).__name__, expected)
        self.into = nn.Linear(2 * shape.heads * self.taps, hidden, dtype=torch.float32)
        # without a bias: softmax cancels what is added to all keys alike
        self.out = nn.Linear(hidden * self.taps, shape.heads, bias=False, dtype=torch.float32)

    def modify_scores(self, s: Tensor, q: Tensor, k: Tensor, block: QueryKeyBlock) -> Tensor:
        b = block.evaluate(self._bias)  # (H, Tq, Tk) or (B, H, Tq, Tk)
        return s + b + self._network(s, b, block)  # (B, H, Tq, Tk)

    def _bias(self, distance: Tensor) -> Tensor:
        b = self.over.bias(distance)
        assert b is not None
        return b

    def _network(self, s: Tensor, b: Tensor, block: QueryKeyBlock) -> Tensor:
        """(B, H, Tq, Tk) of scores of that shape and biases of that or (H, Tq, Tk)."""
        network = self.into.weight, self.into.bias, self.out.weight
        return pair_network(s.flatten(-2), b.flatten(-2), *network).unflatten(-1, s.shape[-2:])


class DAPEv2(DAPE):
    """`DAPE` whose two layers are convolutions that read each key with its two neighbours (Zheng et al. 2024, arXiv
    2410.04798, section 3.3).

    Keys that a query does not see are 0 before each convolution, so that no result depends on the edge of a window or
    of a block. The public code does this before the first convolution only.

    Parameters: `2 * H + 9 * H * hidden + hidden` with the default bias, one set per layer unless said otherwise.
    Cost: explicit scores, and ``hidden`` numbers for each with three times DAPE's products.

    Args:
        shape: Sizes of the model.
        over: Builder of the strategy whose bias b is, given the shape.
        hidden: Width of the network.

    Raises:
        UserError: If the width is not positive, or the other strategy is not a bias by distance alone.
    """

    taps = 3

    def _network(self, s: Tensor, b: Tensor, block: QueryKeyBlock) -> Tensor:
        of_s, of_b = self.into.weight.unflatten(-1, (self.taps, -1)).chunk(2, -1)  # (hidden, taps, H) each
        # the first layer's products with b are the same for the whole batch
        hidden = self._layer(of_s, s, block) + self._layer(of_b, b, block) + self.into.bias[:, None, None]
        hidden = F.leaky_relu(hidden, inplace=True)  # (B, hidden, Tq, Tk)
        return self._layer(self.out.weight.unflatten(-1, (self.taps, -1)), hidden, block)

    def _layer(self, weight: Tensor, x: Tensor, block: QueryKeyBlock) -> Tensor:
        """One layer without its bias, weight (n, 3, c) over the channels of x (…, c, Tq, Tk); (…, n, Tq, Tk)."""
        x = F.pad(x.masked_fill(~block.seen, 0), (1, 1))  # (…, c, Tq, Tk + 2)
        keys = block.seen.shape[-1]
        near = torch.cat([x[..., i : i + keys] for i in range(3)], -3)  # (…, 3c, Tq, Tk): key n - 1, n, n + 1
        return product(weight.flatten(1), near.flatten(-2)).unflatten(-1, block.seen.shape)
