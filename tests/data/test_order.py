import numpy as np
import pytest

from kerple.base.errors import UserError
from kerple.data.order import Order, Permutation, SectionOrder


def test_a_permutation_visits_every_entry_once_and_is_uniform_over_keys():
    for size in (1, 2, 3, 100, 101, 4096):
        assert np.array_equal(np.sort(Permutation(size, 7)(np.arange(size))), np.arange(size))
    counts = np.zeros((10, 10))
    for key in range(500):
        counts[np.arange(10), Permutation(10, key)(np.arange(10))] += 1
    assert ((counts - 50) ** 2 / 50).sum() < 81 + 5 * np.sqrt(2 * 81)  # 81 degrees of freedom, five standard deviations


def test_neighbours_are_distributed_over_the_whole_corpus():
    places = Permutation(10**9, 3)(np.arange(10_000))
    assert np.bincount(places // 250_000_000, minlength=4).min() > 2300
    assert abs(np.corrcoef(places[:-1], places[1:])[0, 1]) < 0.05


def test_an_epoch_has_disjoint_targets_and_the_next_another_offset_and_order():
    tokens, length = 10_007, 64
    order = Order(tokens, length, 1235)
    epochs = order.starts(np.arange(3 * order.samples)).reshape(3, -1)
    for starts in epochs:
        assert starts.min() >= 0
        assert starts.max() + length + 1 <= tokens
        assert np.array_equal(np.diff(np.sort(starts)), np.full(order.samples - 1, length))
    assert len({int(starts.min()) for starts in epochs}) > 1
    permuted = [starts - starts.min() for starts in epochs]  # without the offset
    assert not np.array_equal(permuted[0], permuted[1])


def test_a_stream_too_short_for_a_sample_is_refused():
    for tokens in (0, 127):
        with pytest.raises(UserError, match=f"length: got 64, expected at most {tokens // 2}, half of the"):
            Order(tokens, 64, 0)
    assert Order(128, 64, 0).samples == 1


SIZES = [700, 90, 1000, 0, 333, 641, 20, 512, 64, 800]  # tokens of shards; two of them are too small for a sample
LENGTH, SECTION = 32, 3


def test_a_pass_over_sections_has_disjoint_targets_inside_shards_and_few_shards_at_a_time():
    ends = np.cumsum(SIZES)
    order = SectionOrder(ends, LENGTH, SECTION, 5)
    counts = [max(0, size // LENGTH - 1) for size in SIZES]
    assert order.samples == sum(counts)
    visits = []
    for number in range(4):
        starts = order.starts(number * order.samples + np.arange(order.samples))
        shards = np.searchsorted(ends, starts, side="right")
        assert np.array_equal(shards, np.searchsorted(ends, starts + LENGTH, side="right"))  # both ends in one shard
        assert np.diff(np.sort(starts)).min() >= LENGTH
        assert np.bincount(shards, minlength=len(SIZES)).tolist() == counts
        visits.append(list(dict.fromkeys(shards.tolist())))
        for first in range(0, len(visits[-1]), SECTION):
            section = visits[-1][first : first + SECTION]
            places = np.flatnonzero(np.isin(shards, section))
            assert places.max() - places.min() == len(places) - 1  # no other shard in between
    assert len({tuple(visit) for visit in visits}) == 4


def test_a_sample_of_a_section_depends_only_on_its_index():
    order = SectionOrder(np.cumsum(SIZES), LENGTH, SECTION, 5)
    samples = np.arange(3 * order.samples)
    shuffled = np.random.default_rng(0).permutation(samples)
    expected = order.starts(samples)
    assert np.array_equal(SectionOrder(np.cumsum(SIZES), LENGTH, SECTION, 5).starts(shuffled), expected[shuffled])
    assert [int(order.starts(np.array([k]))[0]) for k in samples[::7]] == expected[::7].tolist()
    assert not np.array_equal(SectionOrder(np.cumsum(SIZES), LENGTH, SECTION, 6).starts(samples), expected)


@pytest.mark.parametrize("nodes", [2, 4])
def test_nodes_read_different_shards_of_a_section_and_together_the_batch(nodes):
    sizes = [1000 + 37 * (i % 5) for i in range(64)]
    ends = np.cumsum(sizes)
    order = SectionOrder(ends, LENGTH, 16, 5)
    batches = np.arange(order.samples // 24 * 24).reshape(-1, 24)
    lanes = order.lane(batches.ravel()).reshape(batches.shape)
    arranged = np.take_along_axis(batches, lanes.argsort(axis=1, kind="stable"), axis=1)
    assert np.array_equal(np.sort(arranged, axis=1), batches)
    for node in np.split(arranged, nodes, axis=1):
        shards = set(np.searchsorted(ends, order.starts(node.ravel()), side="right").tolist())
        assert len(shards) <= 64 / nodes + 4 * 3  # two neighbours and the batch between sections, in each of 4 sections


def test_shards_too_small_for_a_sample_are_refused():
    with pytest.raises(UserError, match="length: got 64, expected at most 60, half of the tokens of the largest shard"):
        SectionOrder([120, 220], 64, 2, 0)
