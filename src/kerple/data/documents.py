"""The documents of training samples and of blocks of text."""

from dataclasses import dataclass

import numpy as np
import torch
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

    def entries(self, segments: Indices, length: int) -> dict[str, Tensor]:
        """Return the entries ``documents`` and ``scored`` of a `kerple.model.Batch`, if the options need them.

        Args:
            segments: Index of the first token of each segment, (B,) int64.
            length: Number of tokens in a segment, T + 1.
        """
        second = segments + 1  # the first input of a document is the token before its first token
        begins = self.begins if len(self.begins) else np.zeros(1, np.int64)  # without documents, all tokens are in one
        before, stop = begins.searchsorted(second) - 1, begins.searchsorted(second + length)
        rows, documents = ranges(before, stop)  # a segment begins in the document before those that begin in it
        numbers = documents - before[rows]
        columns = np.where(numbers, begins[documents] - second[rows], 0)  # of the first input of each document
        entries = {}
        if self.mask:
            places = rows * length + columns
            sizes = np.append(places[1:], len(segments) * length) - places
            entries["documents"] = torch.from_numpy(numbers.repeat(sizes).reshape(-1, length))
        if not self.score_first:
            scored = np.ones((len(segments), length - 1), bool)
            unscored = (numbers > 0) & (columns < length - 1)
            scored[rows[unscored], columns[unscored]] = False
            entries["scored"] = torch.from_numpy(scored)
        return entries


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
