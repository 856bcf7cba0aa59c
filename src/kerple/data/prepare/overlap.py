"""The overlap of test documents with the training text: runs of tokens that occur in both.

A loss on copied training text, such as a licence or another version of a file, says little about unseen text. The
overlap counts runs of `GRAM` tokens, which are compared by hashes of 64 bits.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kerple.data.shards import Tokens

GRAM = 32  # tokens
CHUNK = 1 << 18  # tokens that are hashed at once; their hashes fit into the cache of a processor


def gram_hashes(tokens: Tokens, end_of_text: int) -> NDArray[np.uint64]:
    """Hash of the `GRAM` tokens from each index on, (n - GRAM + 1,) uint64; 0 if a document ends among them.

    The hash is a polynomial in an odd number modulo 2^64. Its coefficients are a random number for each token id.
    """
    codes = np.random.default_rng(0).integers(1, 1 << 63, max(int(tokens.max(initial=0)), end_of_text) + 1, np.uint64)
    hashes, base, length = codes[tokens], np.array([0x9E3779B97F4A7C15], np.uint64), 1
    ends = tokens == end_of_text
    while length < GRAM:  # two hashes give one of twice the length
        hashes = hashes[:-length] * base + hashes[length:]
        ends = ends[:-length] | ends[length:]
        base, length = base * base, 2 * length
    hashes[ends] = 0
    return hashes


def overlap(test: Iterable[Tokens], training: Iterable[Tokens], end_of_text: int) -> NDArray[np.float64]:
    """The fraction of the runs of `GRAM` tokens of each test document that occur in a training document.

    Args:
        test: Tokens of the shards of the test split; a shard ends with the end of a document.
        training: Tokens of the shards of the training split.
        end_of_text: The token at the end of each document.

    Returns:
        Fractions (documents,) fp64, 0 for documents that are shorter than a run.
    """
    tokens = np.concatenate([np.empty(0, np.uint16), *test])
    document = np.concatenate([[0], np.cumsum(tokens == end_of_text)])[:-1]
    if len(tokens) < GRAM:
        return np.zeros(int((tokens == end_of_text).sum()))
    hashes = gram_hashes(tokens, end_of_text)
    inside = hashes != 0
    different, number = np.unique(hashes[inside], return_inverse=True)
    shared = np.zeros(len(different), bool)
    bits = np.uint64(64 - max(16, min(30, len(different).bit_length() + 3)))
    # indexed by the first bits of a hash, which rule out most hashes of the training text
    possible = np.zeros(1 << (64 - int(bits)), bool)
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
