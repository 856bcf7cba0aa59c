"""`DAPE` and `DAPEv2`: a small network corrects the scores, given the scores and biases of all heads."""

import torch
from torch import Tensor, nn

from kerple.positions.base import Position, Shape, StrategyBuilder, is_distance_bias
from kerple.positions.kerple import KerpleLog
from kerple.positions.pair_network import pair_network
from kerple.positions.token_positions import QueryKeyBlock


class DAPE(Position):
    """Scores ``s + b + W_2·LeakyReLU(W_1·[s; b])`` of a query and a key, with their scores s in the H heads and biases
    b of the strategy ``over`` (Zheng et al. 2024, arXiv 2405.14722, section 3.2).

    The scores s are scaled. The strategy computes the H biases b from the distance. [s; b] is their concatenation.
    Positions enter only through b. The first layer of the network also has a bias vector, which the formula omits.

    Parameters: `2 * H + 3 * H * hidden + hidden` with the default bias, one set per layer by default.
    Cost: explicit scores, and ``hidden`` numbers for each pair of query and key.

    Args:
        shape: Sizes of the model.
        over: Function that builds the strategy of the biases b from the shape.
        hidden: Number of hidden units of the network.

    Raises:
        UserError: If ``hidden`` is not positive, or the strategy of ``over`` is not only a bias by distance.
    """

    shift_invariant = True
    per_layer = True
    taps = 1
    """Number of keys that each layer of the network reads for one output: the key itself and its neighbours."""

    def __init__(self, shape: Shape, over: StrategyBuilder = KerpleLog, hidden: int = 32) -> None:
        super().__init__()
        self.require(hidden >= 1, "hidden", hidden, "a positive width, such as 32")
        self.over = over(shape)
        expected = "a strategy that is a bias by distance and nothing else, such as KerpleLog, ALiBi or T5"
        self.require(is_distance_bias(self.over), "over", type(self.over).__name__, expected)
        self.into = nn.Linear(2 * shape.heads * self.taps, hidden, dtype=torch.float32)
        # no bias, because softmax cancels a constant that is added to the scores of all keys
        self.out = nn.Linear(hidden * self.taps, shape.heads, bias=False, dtype=torch.float32)

    def modify_scores(self, s: Tensor, q: Tensor, k: Tensor, block: QueryKeyBlock) -> Tensor:
        b = block.evaluate(self.over.bias).to(s.dtype)  # (H, Tq, Tk) or (B, H, Tq, Tk)
        inputs = (s, b) if self.taps == 1 else (x.masked_fill(~block.seen, 0) for x in (s, b))
        w1_s, w1_b = self.into.weight.unflatten(-1, (self.taps, -1)).chunk(2, -1)  # (hidden, taps, H) each
        # of key n + 1, n and n - 1 for the result of key n
        w2 = self.out.weight.unflatten(-1, (self.taps, -1)).flip(1).movedim(1, 0)  # (taps, H, hidden)
        weights = w1_s.flatten(1), w1_b.flatten(1), self.into.bias, w2.flatten(0, 1)
        return s + b + pair_network(*inputs, block.seen, *(x.to(s.dtype) for x in weights))  # (B, H, Tq, Tk)


class DAPEv2(DAPE):
    """`DAPE` whose two layers are convolutions over three neighbouring keys (Zheng et al. 2024, arXiv 2410.04798,
    section 3.3).

    Inputs of unseen keys are set to 0 before each convolution. The number of unseen keys in a block grows with the
    number of its queries, and must not change the results. The authors' code sets these inputs to 0 only before the
    first convolution.

    Parameters: `2 * H + 9 * H * hidden + hidden` with the default bias, one set per layer by default.
    Cost: that of `DAPE`, with three times the products.

    Args:
        shape: Sizes of the model.
        over: Function that builds the strategy of the biases b from the shape.
        hidden: Number of channels between the convolutions.

    Raises:
        UserError: If ``hidden`` is not positive, or the strategy of ``over`` is not only a bias by distance.
    """

    taps = 3
