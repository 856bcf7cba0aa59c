"""The documents of training samples and of blocks of text."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kerple.data.order import Indices


@dataclass(eq=False)
class Documents:
    """The documents of a token stream, as they are used in training and validation.

    As an input, the end-of-text token after a document is the first token of the next document, which it predicts.

    Args:
        begins: Index of the first token of each document, (documents,) int64, ascending.
        mask: Whether queries see only keys of their own document.
        score_first: Whether the first token of a document is a scored target.
    """

    begins: Indices
    mask: bool = True
    score_first: bool = True

    def starts(self, segments: Indices, length: int) -> NDArray[np.bool_]:
        """Return which tokens of segments are the first input of a document, (segments, length) bool.

        Args:
            segments: Index of the first token of each segment, (segments,) int64.
            length: Number of tokens in a segment.
        """
        second = segments + 1  # the first input of a document is the token before its first token
        first, stop = self.begins.searchsorted(second), self.begins.searchsorted(second + length)
        starts = np.zeros((len(segments), length), bool)
        rows, documents = ranges(first, stop)
        starts[rows, self.begins[documents] - second[rows]] = True
        return starts

    def entries(self, starts: NDArray[np.bool_]) -> dict[str, Tensor]:
        """Return the entries ``documents`` and ``scored`` of a `kerple.model.Batch`, if the options need them.

        Args:
            starts: Which tokens are the first input of a document, (B, T + 1) bool.
        """
        entries = {"documents": torch.from_numpy(starts).cumsum(1)} if self.mask else {}
        return entries if self.score_first else entries | {"scored": torch.from_numpy(~starts[:, :-1])}


def ranges(first: Indices, stop: Indices) -> tuple[Indices, Indices]:
    """Return the integers from ``first``[i] to ``stop``[i] - 1 for each i, and before them the i of each integer."""
    counts = stop - first
    rows = np.arange(len(counts)).repeat(counts)
    return rows, np.arange(len(rows)) + (stop - counts.cumsum())[rows]


def mean_visible_keys(lengths: Indices, length: int, packed: bool) -> float:
    """Return the mean number of keys that a query sees within its document.

    Args:
        lengths: Number of tokens of each document, (documents,) int64.
        length: Number of inputs of a sample, T.
        packed: Whether documents are packed by best fit. Otherwise the mean is over all offsets of the samples.
    """
    whole, rest = np.divmod(lengths, length)
    if packed:
        pairs = whole * (length * (length + 1) // 2) + rest * (rest + 1) // 2
        return float(pairs.sum() / lengths.sum())
    rows = np.arange(1, length + 1)  # of a token in its document, from 1
    # a query sees the smaller of its row in the document and its row in the sample, which has any value equally often
    keys = rows * (rows + 1) / 2 / length + rows * (length - rows) / length
    first = np.minimum(lengths, length)
    sums = np.append(0.0, keys.cumsum())[first] + (lengths - first) * (length + 1) / 2
    return float(sums.sum() / lengths.sum())
