"""Strategies that leave the scores alone: nothing at all, or something added to the token embeddings."""

from kerple.positions.base import Position, Shape


class NoPE(Position):
    """No positional information but the causal mask (Haviv et al. 2022, arXiv 2203.16634; Kazemnejad et al. 2023, arXiv 2305.19466).

    Args:
        shape: What the model hands to every strategy. NoPE has no parameters.
    """

    shift_invariant = True

    def __init__(self, shape: Shape) -> None:
        super().__init__()
