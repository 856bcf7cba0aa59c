"""How much of each test document stands in the training text too, word for word.

A near-copy of training text says little about what a model does with text that it has not seen: a licence, a table, the
next version of the same file. What is counted are runs of `GRAM` tokens, by a hash of 64 bits of each.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kerple.data.shards import Tokens

GRAM = 32  # tokens
CHUNK = 1 << 18  # tokens that are hashed at once, so that they stay in the cache of a processor


def gram_hashes(tokens: Tokens, end_of_text: int) -> NDArray[np.uint64]:
    """A hash of the `GRAM` tokens from each position on, (n - GRAM + 1,) uint64; 0 where a document ends among them.

    It is a polynomial in an odd number, modulo 2^64, of a random number for each token.
    """
    codes = np.random.default_rng(0).integers(1, 1 << 63, max(int(tokens.max(initial=0)), end_of_text) + 1, np.uint64)
    hashes, base, length = codes[tokens], np.array([0x9E3779B97F4A7C15], np.uint64), 1
    ends = tokens == end_of_text
    while length < GRAM:  # of twice the length: the first half, moved up, plus the second half
        hashes = hashes[:-length] * base + hashes[length:]
        ends = ends[:-length] | ends[length:]
        base, length = base * base, 2 * length
    hashes[ends] = 0
    return hashes


def overlap(test: Iterable[Tokens], training: Iterable[Tokens], end_of_text: int) -> NDArray[np.float64]:
    """The fraction of each test document's runs of `GRAM` tokens that stand in a training document, (documents,).

    Args:
        test: The shards of the test split, which end where a document ends.
        training: Those of the training split.
        end_of_text: The token that ends each document.

    Returns:
        Fractions of 0 to 1, in the order of the documents; 0 for one that is shorter than a run.
    """
    nothing = np.empty(0, np.uint16)
    tokens = np.concatenate([nothing, *test])
    document = np.concatenate([[0], np.cumsum(tokens == end_of_text)])[:-1]
    if len(tokens) < GRAM:
        return np.zeros(int((tokens == end_of_text).sum()))
    hashes = gram_hashes(tokens, end_of_text)
    inside = hashes != 0
    different, number = np.unique(hashes[inside], return_inverse=True)
    shared = np.zeros(len(different), bool)
    bits = np.uint64(64 - max(16, min(30, len(different).bit_length() + 3)))
    possible = np.zeros(1 << (64 - int(bits)), bool)  # a look at the first bits says of most hashes that they are new
    possible[different >> bits] = True
    for shard in training:
        for start in range(0, len(shard) - GRAM + 1, CHUNK):
            seen = gram_hashes(shard[start : start + CHUNK + GRAM - 1], end_of_text)
            seen = seen[possible[seen >> bits]]
            index = np.searchsorted(different, seen).clip(max=len(different) - 1)
            shared[index[different[index] == seen]] = True
    count = int(document[-1]) + 1
    runs = np.bincount(document[: len(hashes)][inside], minlength=count)
    return np.bincount(document[: len(hashes)][inside], shared[number], count) / np.maximum(runs, 1)
