"""Random positions, and places of a task with random shifts."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kerple import positions
from kerple.base.errors import UserError
from kerple.model.generation import fill_in
from kerple.model.transformer import Transformer
from kerple.positions import Abacus, Coupled, Position, RandomizedPositions, Shape, TokenPositions
from kerple.positions.wrapper import Resampled
from kerple.tasks import Addition, TaskData
from kerple.tasks.sampling import collate
from kerple.testing.subject import set_positions
from kerple.training.language_model import LanguageModel

SHAPE = Shape(32, 4, 12)


def drawn_ids(position: RandomizedPositions, length: int) -> list[int]:
    """Return the positions of an input of this length, and check that they are sorted and distinct."""
    ids = position.remap_positions(TokenPositions.arange(length, offset=7), torch.zeros(1, length)).ids.tolist()
    assert len(ids) == length
    assert ids == sorted(set(ids))
    return ids


def test_draws_are_ordered_distinct_and_of_the_whole_range() -> None:
    position, counts = RandomizedPositions(SHAPE, max_positions=40), torch.zeros(40)
    for _ in range(400):
        counts[position.drawn] += 1
        assert set(drawn_ids(position, 5)) < set(drawn_ids(position, 12)) == set(position.drawn.tolist())
        position.constrain_()
    # every position is as likely as any other: 12 of 40 are drawn, mean 120, standard deviation 9
    assert (counts - 120).abs().max() < 5 * 9


@pytest.mark.parametrize("length", [5, 12, 30])
def test_in_evaluation_positions_are_drawn_once(length: int) -> None:
    """In section 3 of Ruoss et al., positions of a test are drawn in the same way as in training."""
    position = RandomizedPositions(SHAPE, max_positions=400).eval()
    ids = drawn_ids(position, length)
    assert length < ids[-1] < 400
    assert max(b - a for a, b in pairwise(ids)) > 1
    position.constrain_()
    assert drawn_ids(position, length) == ids
    assert drawn_ids(RandomizedPositions(SHAPE, max_positions=400).eval(), length) == ids
    assert drawn_ids(RandomizedPositions(SHAPE, max_positions=400, seed=1).eval(), length) != ids


@pytest.mark.parametrize(("strategy", "buffer"), [(RandomizedPositions, "drawn"), (Coupled, "shift_fraction")])
def test_draws_are_a_function_of_the_seed_and_the_steps_taken(strategy: type[Resampled], buffer: str) -> None:
    def draws(position: Resampled) -> list[object]:
        values = []
        for _ in range(5):
            values.append(getattr(position, buffer).tolist())
            torch.rand(7)  # other random numbers have no effect
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
    strategy = positions.strategies()[name]
    network = tiny_network("RandomizedPositions", length=12, position=strategy, max_positions=60).train()
    tokens, wrappers = torch.randint(0, 50, (1, 12)), list(network.positions)
    logits = network(tokens)
    for i, wrapper in enumerate(wrappers):
        network.positions[i] = wrapper.position
    without_gaps, explicit = network(tokens), set_positions(network, wrappers[0].drawn.sort().values)(tokens)
    torch.testing.assert_close(explicit, logits, atol=1e-5, rtol=1e-4)
    assert torch.allclose(logits, without_gaps, atol=1e-3) == (name == "FoX")  # FoX does not use positions


def test_windows_and_counts_of_keys_do_not_use_max_positions() -> None:
    shape = Shape(32, 4, 12, layers=4)
    assert RandomizedPositions(shape, partial(positions.LayerPattern, windows={"local": 12})).window == 12
    assert RandomizedPositions(shape, positions.Temperature).position.length == 12
    wrapped, direct = RandomizedPositions(shape, positions.SSMax).position, positions.SSMax(shape)
    torch.testing.assert_close(dict(wrapped.state_dict()), dict(direct.state_dict()))


# Places of a task, with random shifts

NARROW = Shape(8, 2, 16)
PLACES = torch.tensor([[1, 2, 3, 0, 1, 2, 0, 0], [1, 2, 0, 2, 5, 0, 1, 0]])


def place_vectors(position: Position, places: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Return the vectors that a strategy adds to tokens with these places, (B, T, 8)."""
    tokens = torch.arange(1, 1 + places.numel()).view(places.shape) if tokens is None else tokens
    rows = torch.arange(places.shape[1])
    shifted = position.remap_positions(TokenPositions(rows, rows, places=places), tokens)
    return position.embed(torch.zeros(*places.shape, 8), shifted)


def test_each_token_gets_the_row_of_its_place_or_nothing() -> None:
    position = Coupled(NARROW, rows=9).eval()
    expected = position.table[PLACES] * (PLACES > 0)[..., None]
    torch.testing.assert_close(place_vectors(position, PLACES), expected, rtol=0, atol=0)


def test_shifts_in_training_use_every_row_and_keep_equal_places_equal() -> None:
    position = Abacus(NARROW, rows=9)
    shifts: tuple[set[int], set[int]] = set(), set()
    for _ in range(200):
        for vectors, places, sequence_shifts in zip(place_vectors(position, PLACES), PLACES, shifts, strict=True):
            assert not vectors[places == 0].any()
            rows = (vectors[places > 0][:, None] == position.table).all(-1).nonzero()[:, 1]
            (shift,) = (rows - places[places > 0]).unique().tolist()
            sequence_shifts.add(shift)
        position.constrain_()
    assert shifts == (set(range(6)), set(range(4)))  # up to 9 - 3 and 9 - 5, the end of the table


@pytest.mark.parametrize("strategy", [Coupled, Abacus])
def test_a_shift_does_not_depend_on_how_a_batch_is_divided_or_padded(strategy: type[Position]) -> None:
    position, data = strategy(NARROW, rows=60), TaskData(Addition(order="reversed"), 30, 6)
    places = data.places(position.scheme)
    examples = [data.sampler.training_problem(data.sample_seed, i) for i in range(32)]
    batch = collate(examples)["tokens"]
    for example, expected in zip(examples, place_vectors(position, places(batch), batch), strict=True):
        tokens = collate([example])["tokens"]  # without padding, as on a separate device
        vectors = place_vectors(position, places(tokens), tokens)[0]
        torch.testing.assert_close(vectors, expected[: tokens.shape[1]], rtol=0, atol=0)
    first = place_vectors(position, torch.ones(32, 1, dtype=torch.int64), batch[:, :1] + torch.arange(32)[:, None])
    assert len(first.unique(dim=0)) > 25  # sequences have different shifts


def test_shifts_of_long_inputs_use_every_row() -> None:
    position, places = Coupled(NARROW, rows=2001), torch.arange(1, 1501).expand(400, -1)
    vectors = place_vectors(position, places, torch.randint(10, (400, 1500)))[:, 0]
    shifts = (vectors[:, None] == position.table).all(-1).nonzero()[:, 1] - 1
    # of 501 shifts, 400 equally likely draws miss 225 on average, with a standard deviation of 8
    assert len(shifts.unique()) > 501 - 225 - 5 * 8
    assert shifts.max() <= 500


def test_on_a_gpu_places_are_checked_only_in_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index outside the table ends the process on a GPU. In training the check would synchronise at each step."""
    monkeypatch.setattr("kerple.positions.position_coupling.readable", lambda places, wait: wait)
    with pytest.raises(UserError, match="Abacus: rows: got 5, expected 6 or more, because a token has place 5"):
        place_vectors(Abacus(NARROW, rows=5).eval(), PLACES)
    with pytest.raises(IndexError):
        place_vectors(Abacus(NARROW, rows=5), PLACES)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((Abacus, Coupled), r"model\.position: got Abacus and Coupled, expected one"),
        ((Coupled,), "data: got dict, expected TaskData, because the strategy Coupled needs a task"),
    ],
)
def test_places_of_two_rules_or_without_a_task_are_errors(parts: tuple[type[Position], ...], message: str) -> None:
    model = LanguageModel(partial(positions.Combined, parts=parts), 9, 8, layers=1, dim=16, heads=2)
    with pytest.raises(UserError, match=f"^{message}"):
        model.set_places({})


@pytest.mark.parametrize("strategy", [Coupled, Abacus, partial(Abacus, position=positions.FIRE)])
def test_places_are_equal_with_and_without_a_cache(strategy: object) -> None:
    data = TaskData(Addition(order="reversed"), 30, 6, test_lengths=[6], test_examples=8)
    model = LanguageModel(strategy, data.vocabulary, data.length, layers=2, dim=16, heads=2)
    model.set_places(data)
    network, batch = model.network.eval(), collate(data.test_problems[0])
    tokens = batch["tokens"][:, :-1]
    logits, cache = network(tokens), network.new_cache()
    with_cache = torch.cat([network(token, cache=cache) for token in tokens.split(1, 1)], 1)
    torch.testing.assert_close(with_cache, logits, rtol=1e-4, atol=1e-5)
    assert fill_in(network, batch["tokens"], batch["scored"]).shape == batch["tokens"].shape
    network.places = None
    assert not torch.allclose(network(tokens), logits)  # the places had an effect
