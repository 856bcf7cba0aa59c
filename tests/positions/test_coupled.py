"""Vectors for the places of a task: what is added, shifts in training, what is refused, and the way from the task."""

from functools import partial

import pytest
import torch
from pytorch_lightning import LightningDataModule

from kerple.base.errors import UserError
from kerple.model import Transformer
from kerple.model.generation import fill_in
from kerple.positions import FIRE, Abacus, Coupled, NoPE, Position, Shape, TokenPositions
from kerple.tasks import Addition, Copy, TaskData
from kerple.tasks.sampling import collate
from kerple.training.language_model import LanguageModel
from tests.toy import ToyData

SHAPE = Shape(8, 2, 16)
PLACES = torch.tensor([[1, 2, 3, 0, 1, 2, 0, 0], [1, 2, 0, 2, 5, 0, 1, 0]])


def at(places: torch.Tensor) -> TokenPositions:
    line = TokenPositions.line(places.shape[1])
    return TokenPositions(line.rows, line.positions, places=places)


def added(position: Position, places: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
    tokens = torch.arange(1, 1 + places.numel()).view(places.shape) if tokens is None else tokens
    return position.embed(torch.zeros(*places.shape, 8), position.remap_positions(at(places), tokens))


def test_each_token_is_given_the_row_of_its_place_and_nothing_without_one() -> None:
    position = Coupled(SHAPE, reach=9).eval()
    found = added(position, PLACES)
    for sequence, row in zip(found, PLACES.tolist(), strict=True):
        for vector, place in zip(sequence, row, strict=True):
            expected = position.table[place] if place else torch.zeros(8)
            assert torch.equal(vector, expected)


def test_in_training_every_row_is_reached_by_shifts_that_keep_equal_places_equal() -> None:
    position = Abacus(SHAPE, reach=9)
    seen: dict[int, set[int]] = {0: set(), 1: set()}
    for _ in range(200):
        for i, (sequence, row) in enumerate(zip(added(position, PLACES), PLACES.tolist(), strict=True)):
            pairs = zip(sequence, row, strict=True)
            rows = [int((position.table == vector).all(1).nonzero()) if place else 0 for vector, place in pairs]
            (shift,) = {found - place for found, place in zip(rows, row, strict=True) if place}
            assert all(found == 0 for found, place in zip(rows, row, strict=True) if not place)
            seen[i].add(shift)
        position.constrain_()
    assert seen == {0: set(range(6)), 1: set(range(4))}  # 9 - 3 and 9 - 5: as far as the table goes


@pytest.mark.parametrize("strategy", [Coupled, Abacus])
def test_a_shift_does_not_depend_on_how_a_batch_is_divided_or_padded(strategy: type[Position]) -> None:
    position, data = strategy(SHAPE, reach=60), TaskData(Addition(order="reversed"), 30, 6)
    places = data.places(position.scheme)
    examples = [data.sample(i) for i in range(32)]
    whole = collate(examples)["tokens"]
    expected = added(position, places(whole), whole)
    for one, row in zip(examples, expected, strict=True):
        tokens = collate([one])["tokens"]  # as on a device of its own, without padding
        torch.testing.assert_close(added(position, places(tokens), tokens)[0], row[: tokens.shape[1]], rtol=0, atol=0)
    first = added(position, torch.ones(32, 1, dtype=torch.int64), whole[:, :1] + torch.arange(32)[:, None])
    assert len({tuple(row) for row in first[:, 0].tolist()}) > 25  # or all would have one shift


def test_shifts_are_a_function_of_the_seed_and_the_steps_taken() -> None:
    def shifts(position: Coupled) -> list[float]:
        found = []
        for _ in range(5):
            found.append(float(position.share))
            position.constrain_()
        return found

    one = Coupled(SHAPE)
    assert shifts(one) == shifts(Coupled(SHAPE)) != shifts(Coupled(SHAPE, seed=1))
    resumed = Coupled(SHAPE)
    resumed.load_state_dict(one.state_dict())
    assert shifts(resumed) == shifts(one)


def test_up_to_as_many_rows_as_dimensions_start_at_right_angles() -> None:
    few, many = Coupled(SHAPE, reach=8, size=2.0), Coupled(SHAPE, reach=9, size=2.0)
    assert torch.allclose(few.table @ few.table.T, 4 * torch.eye(8), atol=1e-5)
    assert not torch.allclose(many.table @ many.table.T, 4 * torch.eye(9), atol=1e-1)


def test_what_cannot_be_is_told_in_one_line() -> None:
    with pytest.raises(UserError, match="Coupled: reach: got 1, expected at least 2 rows"):
        Coupled(SHAPE, reach=1)
    for size in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match=f"Coupled: size: got {size}, expected a positive length"):
            Coupled(SHAPE, size=size)
    with pytest.raises(UserError, match="Abacus: reach: got 5, expected 6 or more, as a token has place 5"):
        added(Abacus(SHAPE, reach=5).eval(), PLACES)


def test_in_evaluation_a_gpu_is_asked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it reads beyond a table would end the process; in training a question at each step would stall it."""
    monkeypatch.setattr("kerple.positions.coupled.readable", lambda places, wait: wait)
    with pytest.raises(UserError, match="reach: got 5, expected 6 or more"):
        added(Abacus(SHAPE, reach=5).eval(), PLACES)
    with pytest.raises(IndexError):
        added(Abacus(SHAPE, reach=5), PLACES)


def model(position: object, data: LightningDataModule) -> LanguageModel:
    return LanguageModel(position, data.vocabulary, data.length, layers=2, dim=16, heads=2)


def test_data_without_places_are_refused_in_one_line() -> None:
    with pytest.raises(UserError, match="position: Coupled asks for the places of a task, got data ToyData"):
        model(Coupled, ToyData()).attach(ToyData())
    with pytest.raises(UserError, match="got 'copy', expected one with numbers"):
        model(Abacus, TaskData(Copy(), 42)).attach(TaskData(Copy(), 42))
    data = TaskData(Addition(order="reversed"), 64)
    with pytest.raises(UserError, match="got Abacus and Coupled, expected one of them"):
        model(partial(Coupled, position=Abacus), data).attach(data)
    plain = model(NoPE, ToyData())
    plain.attach(ToyData())
    assert plain.network.places is None


@pytest.mark.parametrize("strategy", [Coupled, Abacus, partial(Abacus, position=FIRE)])
def test_a_network_reads_the_places_in_one_go_and_token_by_token(strategy: object) -> None:
    torch.manual_seed(0)
    data = TaskData(Addition(order="reversed"), 30, 6, test_lengths=[6], test_examples=8)
    module = model(strategy, data)
    module.attach(data)
    network: Transformer = module.network.eval()
    batch = collate(data.test_problems[0])
    whole = network(batch["tokens"][:, :-1])
    cache = network.new_cache()
    parts = [network(batch["tokens"][:, i : i + 1], cache=cache) for i in range(whole.shape[1])]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)
    network.places = None
    assert not torch.allclose(network(batch["tokens"][:, :-1]), whole)  # the places were in it
    network.places = data.places(module.network.positions[0].scheme)
    written = fill_in(network, batch["tokens"], batch["scored"])
    assert written.shape == batch["tokens"].shape
