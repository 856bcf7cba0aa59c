from itertools import pairwise

import numpy as np
import pytest

from kerple.data.prepare import overlap as module
from kerple.data.prepare.overlap import GRAM, overlap

END = 0


def fractions_by_loop(test: list[list[int]], training: list[list[int]]) -> list[float]:
    seen = {tuple(t[i : i + GRAM]) for t in training for i in range(len(t) - GRAM + 1)}
    runs = [[tuple(t[i : i + GRAM]) for i in range(len(t) - GRAM + 1)] for t in test]
    return [sum(run in seen for run in r) / max(len(r), 1) for r in runs]


def shards(documents: list[list[int]], cuts: list[int]) -> list[np.ndarray]:
    return [np.array([i for t in documents[a:b] for i in (*t, END)], np.uint16) for a, b in pairwise(cuts)]


@pytest.mark.parametrize("chunk", [1 << 22, 7, 100])
def test_fractions_equal_those_of_a_loop_over_sets(chunk, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", chunk)
    draw = np.random.default_rng(0)
    training = [draw.integers(1, 5, size).tolist() for size in (300, 10, 700, 33, 31, 500)]
    fresh = [draw.integers(1, 5, size).tolist() for size in (200, 31, 32, 5, 90)]
    test = [
        *fresh,
        training[2][100:200],  # all of its runs occur in a training document
        fresh[0][:50] + training[0][:60] + training[0][100:145],
        training[3],
        training[0][-20:] + training[1],  # not a run, because a training document ends in between
        [*training[5][:40], 4, *training[5][40:80]],
    ]
    expected = fractions_by_loop(test, training)
    assert sum(0 < fraction < 1 for fraction in expected) >= 2
    computed = overlap(shards(test, [0, 3, 4, len(test)]), shards(training, [0, 1, 4, 6]), END)
    assert computed.tolist() == pytest.approx(expected, abs=1e-12)


def test_no_test_document_or_a_short_one():
    training = shards([list(range(1, 100))], [0, 1])
    assert overlap([], training, END).tolist() == []
    assert overlap(shards([[1, 2], [3]], [0, 2]), training, END).tolist() == [0, 0]
    assert overlap(shards([[1, 2], list(range(40, 80))], [0, 2]), [], END).tolist() == [0, 0]
