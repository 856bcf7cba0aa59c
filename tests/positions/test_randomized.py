"""Random positions and random shifts of places: the draws, their effect on hooks, and places of a task."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kerple.base.errors import UserError
from kerple.model.generation import fill_in
from kerple.model.transformer import Transformer
from kerple.positions import (
    FIRE,
    Abacus,
    Combined,
    Coupled,
    LayerPattern,
    Position,
    RandomizedPositions,
    Shape,
    SSMax,
    Temperature,
    TokenPositions,
    strategies,
)
from kerple.positions.wrapper import Resampled
from kerple.tasks import Addition, TaskData
from kerple.tasks.sampling import collate
from kerple.testing.subject import set_positions
from kerple.training.language_model import LanguageModel

SHAPE = Shape(32, 4, 12)


def positions(position: RandomizedPositions, length: int) -> list[int]:
    at = position.remap_positions(TokenPositions.arange(length, offset=7), torch.zeros(1, length)).ids.tolist()
    assert len(at) == length
    assert at == sorted(set(at))
    return at


def test_draws_are_ordered_distinct_and_of_the_whole_range() -> None:
    position, counts = RandomizedPositions(SHAPE, max_positions=40), torch.zeros(40)
    for _ in range(400):
        counts[position.drawn] += 1
        assert set(positions(position, 5)) < set(positions(position, 12)) == set(position.drawn.tolist())
        position.constrain_()
    # every position is as likely as any other: 12 of 40 are drawn, mean 120, standard deviation 9
    assert (counts - 120).abs().max() < 5 * 9


@pytest.mark.parametrize("length", [5, 12, 30])
def test_in_evaluation_positions_are_drawn_once(length: int) -> None:
    """In section 3 of the paper, positions of a test are drawn in the same way as in training."""
    position = RandomizedPositions(SHAPE, max_positions=400).eval()
    drawn = positions(position, length)
    assert length < drawn[-1] < 400
    assert max(b - a for a, b in pairwise(drawn)) > 1
    position.constrain_()
    assert positions(position, length) == drawn
    assert positions(RandomizedPositions(SHAPE, max_positions=400).eval(), length) == drawn
    assert positions(RandomizedPositions(SHAPE, max_positions=400, seed=1).eval(), length) != drawn


@pytest.mark.parametrize(("strategy", "buffer"), [(RandomizedPositions, "drawn"), (Coupled, "shift_fraction")])
def test_draws_are_a_function_of_the_seed_and_the_steps_taken(strategy: type[Resampled], buffer: str) -> None:
    def draws(position: Resampled) -> list[object]:
        values = []
        for _ in range(5):
            values.append(getattr(position, buffer).tolist())
            torch.rand(7)  # other random numbers do not matter
            position.constrain_()
        return values

    position = strategy(SHAPE)
    before = draws(position)
    assert before == draws(strategy(SHAPE)) != draws(strategy(SHAPE, seed=1))
    assert all(a != b for a, b in pairwise(before))
    resumed = strategy(SHAPE)
    resumed.load_state_dict(position.state_dict())
    assert draws(resumed) == draws(position)


@pytest.mark.parametrize("name", ["FoX", "FIRE", "KerpleLog", "Learned", "RoPE"])
def test_in_training_drawn_positions_reach_every_hook(name: str, tiny_network: Callable[..., Transformer]) -> None:
    """Logits with drawn positions equal those of a network with explicit positions, computed pair by pair."""
    network = tiny_network("RandomizedPositions", length=12, position=strategies()[name], max_positions=60).train()
    tokens, wrapped = torch.randint(0, 50, (1, 12)), list(network.positions)
    logits = network(tokens)
    for i, position in enumerate(wrapped):
        network.positions[i] = position.position
    in_line = network(tokens)
    explicit = set_positions(network, wrapped[0].drawn.sort().values)(tokens)
    torch.testing.assert_close(explicit, logits, atol=1e-5, rtol=1e-4)
    assert torch.allclose(logits, in_line, atol=1e-3) == (name == "FoX")  # FoX does not use positions


def test_windows_and_counts_of_keys_use_rows_not_positions() -> None:
    shape = Shape(32, 4, 12, layers=4)
    assert RandomizedPositions(shape, partial(LayerPattern, windows={"local": 12})).window == 12
    assert RandomizedPositions(shape, Temperature).position.length == 12
    weights, plain = RandomizedPositions(shape, SSMax).position, SSMax(shape)
    torch.testing.assert_close(dict(weights.state_dict()), dict(plain.state_dict()))


# Places of a task, with random shifts

NARROW = Shape(8, 2, 16)
PLACES = torch.tensor([[1, 2, 3, 0, 1, 2, 0, 0], [1, 2, 0, 2, 5, 0, 1, 0]])


def added(position: Position, places: Tensor, tokens: Tensor | None = None) -> Tensor:
    tokens = torch.arange(1, 1 + places.numel()).view(places.shape) if tokens is None else tokens
    line = TokenPositions.arange(places.shape[1])
    at = TokenPositions(line.rows, line.ids, places=places)
    return position.embed(torch.zeros(*places.shape, 8), position.remap_positions(at, tokens))


def test_each_token_gets_the_row_of_its_place_or_nothing() -> None:
    position = Coupled(NARROW, rows=9).eval()
    expected = position.table[PLACES] * (PLACES > 0)[..., None]
    torch.testing.assert_close(added(position, PLACES), expected, rtol=0, atol=0)


def test_shifts_in_training_reach_every_row_and_keep_equal_places_equal() -> None:
    position = Abacus(NARROW, rows=9)
    shifts: tuple[set[int], set[int]] = set(), set()
    for _ in range(200):
        for sequence, places, seen in zip(added(position, PLACES), PLACES, shifts, strict=True):
            assert not sequence[places == 0].any()
            rows = (sequence[places > 0][:, None] == position.table).all(-1).nonzero()[:, 1]
            (shift,) = (rows - places[places > 0]).unique().tolist()
            seen.add(shift)
        position.constrain_()
    assert shifts == (set(range(6)), set(range(4)))  # up to 9 - 3 and 9 - 5, the end of the table


@pytest.mark.parametrize("strategy", [Coupled, Abacus])
def test_a_shift_does_not_depend_on_how_a_batch_is_divided_or_padded(strategy: type[Position]) -> None:
    position, data = strategy(NARROW, rows=60), TaskData(Addition(order="reversed"), 30, 6)
    places = data.places(position.scheme)
    examples = [data.sample(i) for i in range(32)]
    whole = collate(examples)["tokens"]
    expected = added(position, places(whole), whole)
    for one, row in zip(examples, expected, strict=True):
        tokens = collate([one])["tokens"]  # without padding, as on a separate device
        torch.testing.assert_close(added(position, places(tokens), tokens)[0], row[: tokens.shape[1]], rtol=0, atol=0)
    first = added(position, torch.ones(32, 1, dtype=torch.int64), whole[:, :1] + torch.arange(32)[:, None])
    assert len({tuple(row) for row in first[:, 0].tolist()}) > 25  # otherwise all sequences would have the same shift


def test_on_a_gpu_places_are_checked_only_in_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index outside the table ends the process on a GPU. In training the check would synchronise at each step."""
    monkeypatch.setattr("kerple.positions.coupled.readable", lambda places, wait: wait)
    with pytest.raises(UserError, match="Abacus: rows: got 5, expected 6 or more, because a token has place 5"):
        added(Abacus(NARROW, rows=5).eval(), PLACES)
    with pytest.raises(IndexError):
        added(Abacus(NARROW, rows=5), PLACES)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((Abacus, Coupled), "got Abacus and Coupled, expected one of them"),
        ((Coupled,), "Coupled needs a task, got data dict"),
    ],
)
def test_places_of_two_rules_or_without_a_task_are_refused(parts: tuple[type[Position], ...], message: str) -> None:
    model = LanguageModel(partial(Combined, parts=parts), 9, 8, layers=1, dim=16, heads=2)
    with pytest.raises(UserError, match=rf"^model\.position: {message}"):
        model.set_places({})


@pytest.mark.parametrize("strategy", [Coupled, Abacus, partial(Abacus, position=FIRE)])
def test_places_are_equal_with_and_without_a_cache(strategy: object) -> None:
    data = TaskData(Addition(order="reversed"), 30, 6, test_lengths=[6], test_examples=8)
    model = LanguageModel(strategy, data.vocabulary, data.length, layers=2, dim=16, heads=2)
    model.set_places(data)
    network = model.network.eval()
    batch = collate(data.test_problems[0])
    tokens = batch["tokens"][:, :-1]
    whole, cache = network(tokens), network.new_cache()
    parts = [network(token, cache=cache) for token in tokens.split(1, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)
    assert fill_in(network, batch["tokens"], batch["scored"]).shape == batch["tokens"].shape
    network.places = None
    assert not torch.allclose(network(tokens), whole)  # the places had an effect
