"""The map over two sizes: each pair in its own cell, the lengths of training framed."""

import numpy as np

from kerple.tasks.accuracy import Accuracy
from kerple.tasks.accuracy_figures import MOST_TICKS, heat_map


def test_every_pair_of_sizes_has_its_cell_and_what_was_not_tested_is_empty() -> None:
    shares = {(20, 0): 0.9, (20, 9): 0.8, (40, 0): 0.5, (80, 9): 0.1}
    cells = {key: Accuracy(share, share, 10, 40) for key, share in shares.items()}
    figure = heat_map(cells, ("length", "tenth of the filler before the needle"), 40, "a map")
    axes = figure.axes[0]

    nothing = float("nan")
    wanted = [[90, 80], [50, nothing], [nothing, 10]]
    np.testing.assert_allclose(axes.images[0].get_array().filled(nothing), wanted)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("tenth of the filler before the needle", "length")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["20", "40", "80"]
    (frame,) = axes.lines
    assert max(frame.get_ydata()) == 1.5  # between lengths 40 and 80


def test_many_sizes_have_few_labels() -> None:
    cells = {(n, 0): Accuracy(1.0, 1.0, 1, 1) for n in range(1, 101)}
    assert 2 < len(heat_map(cells, ("length", "tenth"), 10, "").axes[0].get_yticks()) <= MOST_TICKS
