"""`Coupled` and `Abacus`: learned vectors for places that a task assigns to tokens, such as the places of digits."""

from abc import abstractmethod
from dataclasses import replace

import torch
from torch import Tensor, nn

from kerple.positions.absolute import NoPE
from kerple.positions.base import Shape, StrategyBuilder
from kerple.positions.fp32_matmul import precise
from kerple.positions.token_positions import TokenPositions, readable
from kerple.positions.wrapper import Resampled

GOLDEN = (5**0.5 - 1) / 2  # multiples of it, modulo 1, are spread evenly between 0 and 1


class PlaceEmbedding(Resampled):
    """Learned vectors for the places of tokens, added to the embeddings of the tokens.

    A place is a positive number that the task assigns to a token, such as the significance of a digit. It is the
    index of a row in the table of vectors. Tokens without a place have a 0 instead, and get no vector.

    In training all places of a sequence are shifted by the same number, so that short problems train every row. The
    shift is a random number from 0 to ``rows - 1 - p``, where p is the largest place of the sequence. The shift is a
    function of the seed, the number of optimiser steps and the tokens of the sequence. It does not depend on the number
    of devices or of accumulated batches. In evaluation there is no shift.

    `kerple.training.language_model` passes the task's places to the network, and raises a UserError for data without
    places. In a network without a task, a token at position t has the place ``t % (rows - 1) + 1``. `Coupled` describes
    the options.
    """

    shift_fraction: Tensor
    """Random number of this optimiser step, () fp64 in [0, 1)."""

    @property
    @abstractmethod
    def scheme(self) -> str:
        """Name of the rule by which the task assigns places, for `kerple.tasks.TaskData.places`."""

    def __init__(
        self,
        shape: Shape,
        position: StrategyBuilder = NoPE,
        rows: int = 128,
        seed: int = 0,
        size: float = 3.0,
        learned: bool = True,
    ) -> None:
        super().__init__(position(shape), seed)
        self.require(rows >= 2, "rows", rows, "at least 2 rows; row 0 belongs to tokens without a place")
        self.require(0 < size < float("inf"), "size", size, "a positive norm, such as 3")
        self.shift_invariant = False
        self.rows = rows
        table = torch.empty(rows, shape.dim, dtype=torch.float32)
        # training inputs are short, so that distant places never occur in one input, and training cannot learn to
        # distinguish their rows; orthogonal rows differ from the start
        table = nn.init.orthogonal_(table) * size if rows <= shape.dim else table.normal_(std=size * shape.dim**-0.5)
        # the model calls `embed` only for the strategy of the first layer
        self.table = nn.Parameter(table, requires_grad=learned) if shape.layer == 0 else None
        self.register_buffer("shift_fraction", torch.zeros((), dtype=torch.float64))
        self.draw_()

    def remap_positions(self, positions: TokenPositions, tokens: Tensor) -> TokenPositions:
        positions = self.position.remap_positions(positions, tokens)
        places = positions.ids % (self.rows - 1) + 1 if positions.places is None else positions.places  # ((B,) T)
        largest = places.amax(-1, keepdim=True)
        # tests may have larger places than training, and an index outside the table ends the process on a GPU
        if readable(places, wait=not self.training):
            place = int(largest.max())
            expected = f"{place + 1} or more, because a token has place {place}; or use shorter inputs"
            self.require(place < self.rows, "rows", self.rows, expected)
        if self.training:
            # the checksum ignores tokens without a place, such as padding, because the padding depends on the batch
            tokens = tokens * (places > 0)  # (B, T)
            checksum = (tokens * torch.arange(1, tokens.shape[1] + 1, device=tokens.device)).sum(-1, keepdim=True)
            # in fp32, the checksum of a long input would leave no digits for the fraction
            fraction = (self.shift_fraction + checksum.double() * GOLDEN).frac()  # (B, 1) fp64
            places = torch.where(places > 0, places + (fraction * (self.rows - largest)).long(), 0)  # (B, T)
        return replace(positions, places=places)

    def embed(self, x: Tensor, positions: TokenPositions) -> Tensor:
        assert self.table is not None
        assert positions.places is not None
        vectors = torch.where(positions.places[..., None] > 0, self.table[positions.places], 0)  # ((B,) T, D)
        x = self.position.embed(x, positions)
        return (precise(x) + vectors).to(x.dtype)

    def draw_(self) -> None:
        if not self.shift_fraction.is_meta:
            self.shift_fraction.fill_(self.random_integer(8) / 2**64)  # in [0, 1)


class Coupled(PlaceEmbedding):
    """Position coupling: a learned vector for the place of a token is added to its embedding. The task gives the same
    place to tokens that belong together (Cho et al. 2024, arXiv 2405.20671).

    Parameters: `rows * D`, and those of the strategy ``position``.
    Cost: one (B, T, D) look-up per forward pass.

    Args:
        shape: Sizes of the model.
        position: Function that builds a second strategy from the shape. Cho et al. use none.
        rows: Number of rows of the table, one per place; row 0 is not used. Places must be less than ``rows``.
        seed: Seed of the shifts in training.
        size: Initial norm of a row. Token embeddings have an initial norm of about √D times ``init`` (`Architecture`).
            With a larger norm, initial rows differ enough to distinguish places that never occur together in training.
            All rows are orthogonal at first if ``rows`` <= D; if not, they are drawn from a normal distribution.
        learned: Whether the rows are trained, as in Cho et al. Untrained rows stay orthogonal if ``rows`` <= D.

    Raises:
        UserError: If ``rows`` is below 2, or ``size`` is not positive and finite. In a forward pass, if a place is
            ``rows`` or more; on a GPU this is checked only in evaluation.
    """

    scheme = "coupled"


class Abacus(PlaceEmbedding):
    """Abacus embeddings: a learned vector for the place of a digit is added to its embedding. The i-th digit of every
    number has place i. Digits must be written in reverse order, so that digits of equal significance share a place
    (McLeish et al. 2024, arXiv 2405.17399).

    Parameters: `rows * D`, and those of the strategy ``position``.
    Cost: one (B, T, D) look-up per forward pass.

    The options are those of `Coupled`. McLeish et al. use `FIRE` or `NoPE` as ``position``.
    """

    scheme = "abacus"
