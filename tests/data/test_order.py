import numpy as np
import pytest

from kerple.base.errors import UserError
from kerple.data.order import Order, Permutation


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
