"""`FoX`: forget gates of the tokens between query and key."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kerple.positions.angles import exact_dtype
from kerple.positions.base import Position, Shape
from kerple.positions.fp32_matmul import product
from kerple.positions.token_positions import TokenPositions

FORGOTTEN = -1e4  # smallest logarithm of a gate; sums of -inf would have no differences


class FoX(Position):
    """Forget gates: ``Σ_{n < l <= m} log σ(w_h·x_l + b_h)`` is added to the score of query m and key n in head h
    (Lin et al. 2025, arXiv 2503.02130, section 3.1).

    x_l is the hidden state of token l after the block's norm. w_h and b_h are learned. w_h is initialised from
    N(0, 0.02²).

    Parameters: `H * D + H`, one set per layer by default.
    Cost: one cumulative sum over the keys, and one fp64 number per head and cached token. On a CPU, keys that are
    forgotten so far that they change no result are skipped. Explicit scores on a GPU.

    Args:
        shape: Sizes of the model.
        start: Initial value of b_h. With a larger value, the gates forget less at the start of training.
    """

    shift_invariant = True
    per_layer = True

    def __init__(self, shape: Shape, start: float = 0.0) -> None:
        super().__init__()
        self.gates = nn.Linear(shape.dim, shape.heads, dtype=torch.float32)
        nn.init.normal_(self.gates.weight, std=0.02)
        nn.init.constant_(self.gates.bias, start)

    def token_state(self, x: Tensor, positions: TokenPositions, past: Tensor | None) -> Tensor:
        gates = F.logsigmoid(product(x, self.gates.weight.T) + self.gates.bias).clamp(min=FORGOTTEN).mT  # (B, H, T)
        gates = gates.to(exact_dtype(x.device))  # fp64 for differences of large sums
        # torch 2.11 cannot compile the fp64 cumulative sum of 512 numbers for a GPU
        sums = (gates.cumsum(-1) if x.device.type == "cpu" else cumulative_sums(gates))[..., None]  # (B, H, T, 1)
        return sums if past is None else sums + past[:, :, -1:]

    def key_bias(self, state: Tensor | None) -> Tensor:
        assert state is not None, "FoX's bias needs the state of the keys"
        return -state[..., 0]  # the difference of two sums is the sum over the tokens between query and key


def cumulative_sums(x: Tensor, size: int = 128) -> Tensor:
    """Return ``x.cumsum(-1)``, computed from cumulative sums of at most ``size`` numbers."""
    if x.shape[-1] <= size:
        return x.cumsum(-1)
    pieces = F.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size)).cumsum(-1)
    earlier = cumulative_sums(F.pad(pieces[..., :-1, -1], (1, 0)), size)  # the total of all pieces before each piece
    return (pieces + earlier[..., None]).flatten(-2)[..., : x.shape[-1]]
