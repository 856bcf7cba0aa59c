"""`Coupled` and `Abacus`: positions that a task defines, the same for digits of one significance in any numbers."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from kerple.positions.absolute import NoPE
from kerple.positions.base import Position, Shape
from kerple.positions.products import precise
from kerple.positions.token_positions import TokenPositions, readable
from kerple.positions.wrapper import Resampled

GOLDEN = (5**0.5 - 1) / 2  # its multiples, modulo 1, are spread evenly between 0 and 1


class Placed(Resampled):
    """Adds a learned vector for the place that the task gives a token, and nothing to a token without one.

    In training all places of a sequence are shifted by the same number, so that every row of the table is trained
    however short the problems are. The number is a fraction of the rows that the table has after the largest place. The
    fraction is a function of the seed, the number of optimiser steps and the tokens of the sequence; how a batch is
    divided between devices, or by accumulation, does not change it. In evaluation there is no shift.

    `kerple.training.language_model` passes the task's places to the network, and refuses data without them. Where a
    network is used without a task, the place of a token is its position, modulo the number of rows. `Coupled` explains
    the options.
    """

    shift_fraction: Tensor

    @property
    @abstractmethod
    def scheme(self) -> str:
        """Name of the rule by which the task assigns places, for `kerple.tasks.TaskData.places`."""

    def __init__(
        self,
        shape: Shape,
        position: Callable[[Shape], Position] = NoPE,
        rows: int = 128,
        seed: int = 0,
        size: float = 3.0,
        learned: bool = True,
    ) -> None:
        super().__init__(position(shape), seed)
        self.require(rows >= 2, "rows", rows, "at least 2 rows; row 0 belongs to tokens without a place")
        self.require(0 < size < float("inf"), "size", size, "a positive length such as 3")
        self.shift_invariant = False
        self.rows = rows
        table = torch.empty(rows, shape.dim, dtype=torch.float32)
        # places far apart never occur together in training; rows at right angles are distinct from the start
        table = nn.init.orthogonal_(table) * size if rows <= shape.dim else table.normal_(std=size * shape.dim**-0.5)
        # `embed` is called for the first layer's strategy alone
        self.table = nn.Parameter(table, requires_grad=learned) if shape.layer == 0 else None
        self.register_buffer("shift_fraction", torch.zeros((), dtype=torch.float64))
        self.draw_()

    def remap_positions(self, positions: TokenPositions, tokens: Tensor) -> TokenPositions:
        positions = self.position.remap_positions(positions, tokens)
        places = positions.ids % (self.rows - 1) + 1 if positions.places is None else positions.places  # ((B,) T)
        largest = places.amax(-1, keepdim=True)
        # a test may have larger places than training, and an index beyond the table ends the process on a GPU
        if readable(places, wait=not self.training):
            self.require(
                int(largest.max()) < self.rows,
                "rows",
                self.rows,
                f"{int(largest.max()) + 1} or more, as a token has place {int(largest.max())}; or read less",
            )
        if self.training:
            # tokens without a place are left out, padding among them, whose number depends on the batch
            tokens = tokens * (places > 0)  # (B, T)
            number = (tokens * torch.arange(1, tokens.shape[1] + 1, device=tokens.device)).sum(-1, keepdim=True)
            fraction = (self.shift_fraction + number * GOLDEN).frac()  # (B, 1) fp64
            places = torch.where(places > 0, places + (fraction * (self.rows - largest)).long(), 0)  # (B, T)
        return replace(positions, places=places)

    def embed(self, x: Tensor, positions: TokenPositions) -> Tensor:
        assert self.table is not None
        assert positions.places is not None
        added = torch.where(positions.places[..., None] > 0, self.table[positions.places], 0)  # ((B,) T, D)
        x = self.position.embed(x, positions)
        return (precise(x) + added).to(x.dtype)

    def draw_(self) -> None:
        if not self.shift_fraction.is_meta:
            self.shift_fraction.fill_(self.random_integer(8) / 2**64)  # in [0, 1)


class Coupled(Placed):
    """Position coupling: tokens that belong together in the task have the same place (Cho et al. 2024, arXiv
    2405.20671).

    Parameters: `rows * D` of its own, and those of ``position``.
    Cost: one (B, T, D) look-up a forward.

    Args:
        shape: Sizes of the model.
        position: Builder of the strategy beside it; the paper has none.
        rows: Rows of the table; places end below it.
        seed: Chooses the shifts in training.
        size: Length of a row before training. An embedding has that of the model's init times √D, about 1; with rows of
            several times that, places far apart that never meet in training are distinct, too. Up to D rows start at
            right angles, more of them as normal numbers.
        learned: Whether the rows are trained, as in the paper. Rows that stay as they are keep their right angles.

    Raises:
        UserError: If the table has no two rows, the size is not positive, or, in a forward, a place is beyond it.
    """

    scheme = "coupled"


class Abacus(Placed):
    """Abacus embeddings: the i-th digit of every number has place i (McLeish et al. 2024, arXiv 2405.17399).

    Parameters: `rows * D` of its own, and those of ``position``.
    Cost: one (B, T, D) look-up a forward.

    The options are those of `Coupled`; as ``position`` the paper has FIRE or NoPE.
    """

    scheme = "abacus"
