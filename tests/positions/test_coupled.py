"""Vectors for the places of a task: what is added, shifts in training, what is refused, and the way from the task."""

from functools import partial

import pytest
import torch
from pytorch_lightning import LightningDataModule

from kerple.base.errors import UserError
from kerple.model.generation import fill_in
from kerple.positions import FIRE, Abacus, Coupled, Position, Shape, TokenPositions
from kerple.tasks import Addition, TaskData
from kerple.tasks.sampling import collate
from kerple.training.language_model import LanguageModel

SHAPE = Shape(8, 2, 16)
PLACES = torch.tensor([[1, 2, 3, 0, 1, 2, 0, 0], [1, 2, 0, 2, 5, 0, 1, 0]])


def added(position: Position, places: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
    tokens = torch.arange(1, 1 + places.numel()).view(places.shape) if tokens is None else tokens
    line = TokenPositions.line(places.shape[1])
    at = TokenPositions(line.rows, line.positions, places=places)
    return position.embed(torch.zeros(*places.shape, 8), position.remap_positions(at, tokens))


def test_each_token_is_given_the_row_of_its_place_and_nothing_without_one() -> None:
    position = Coupled(SHAPE, rows=9).eval()
    expected = position.table[PLACES] * (PLACES > 0)[..., None]
    torch.testing.assert_close(added(position, PLACES), expected, rtol=0, atol=0)


def test_in_training_every_row_is_reached_by_shifts_that_keep_equal_places_equal() -> None:
    position = Abacus(SHAPE, rows=9)
    shifts: tuple[set[int], set[int]] = set(), set()
    for _ in range(200):
        for sequence, places, seen in zip(added(position, PLACES), PLACES, shifts, strict=True):
            assert not sequence[places == 0].any()
            rows = (sequence[places > 0][:, None] == position.table).all(-1).nonzero()[:, 1]
            (shift,) = (rows - places[places > 0]).unique().tolist()
            seen.add(shift)
        position.constrain_()
    assert shifts == (set(range(6)), set(range(4)))  # 9 - 3 and 9 - 5: as far as the table goes


@pytest.mark.parametrize("strategy", [Coupled, Abacus])
def test_a_shift_does_not_depend_on_how_a_batch_is_divided_or_padded(strategy: type[Position]) -> None:
    position, data = strategy(SHAPE, rows=60), TaskData(Addition(order="reversed"), 30, 6)
    places = data.places(position.scheme)
    examples = [data.sample(i) for i in range(32)]
    whole = collate(examples)["tokens"]
    expected = added(position, places(whole), whole)
    for one, row in zip(examples, expected, strict=True):
        tokens = collate([one])["tokens"]  # as on a device of its own, without padding
        torch.testing.assert_close(added(position, places(tokens), tokens)[0], row[: tokens.shape[1]], rtol=0, atol=0)
    first = added(position, torch.ones(32, 1, dtype=torch.int64), whole[:, :1] + torch.arange(32)[:, None])
    assert len({tuple(row) for row in first[:, 0].tolist()}) > 25  # or all would have one shift


def test_in_evaluation_a_gpu_is_asked_too_whether_the_table_has_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it reads beyond a table would end the process; in training a question at each step would stall it."""
    monkeypatch.setattr("kerple.positions.coupled.readable", lambda places, wait: wait)
    with pytest.raises(UserError, match="Abacus: rows: got 5, expected 6 or more, as a token has place 5"):
        added(Abacus(SHAPE, rows=5).eval(), PLACES)
    with pytest.raises(IndexError):
        added(Abacus(SHAPE, rows=5), PLACES)


def model(position: object, data: LightningDataModule) -> LanguageModel:
    module = LanguageModel(position, data.vocabulary, data.length, layers=2, dim=16, heads=2)
    module.attach(data)
    return module


@pytest.mark.parametrize("strategy", [Coupled, Abacus, partial(Abacus, position=FIRE)])
def test_a_network_reads_the_places_in_one_go_and_token_by_token(strategy: object) -> None:
    data = TaskData(Addition(order="reversed"), 30, 6, test_lengths=[6], test_examples=8)
    network = model(strategy, data).network.eval()
    batch = collate(data.test_problems[0])
    tokens = batch["tokens"][:, :-1]
    whole, cache = network(tokens), network.new_cache()
    parts = [network(token, cache=cache) for token in tokens.split(1, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)
    assert fill_in(network, batch["tokens"], batch["scored"]).shape == batch["tokens"].shape
    network.places = None
    assert not torch.allclose(network(tokens), whole)  # the places were in it
