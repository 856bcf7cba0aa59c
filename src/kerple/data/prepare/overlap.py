"""The overlap of a test document with the training text: the fraction of its 32-grams that occur in the training text.

A loss on copied training text, such as a licence or another version of a file, says little about unseen text. The
32-grams (sequences of `GRAM` consecutive tokens) are compared by 64-bit hashes.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kerple.data.shards import Tokens

GRAM = 32  # number of tokens in an n-gram
CHUNK = 1 << 18  # number of tokens hashed in one step; their hashes fit into the cache of a processor


def gram_hashes(tokens: Tokens, end_of_text: int) -> NDArray[np.uint64]:
    """Return a hash of each 32-gram, (n - GRAM + 1,) uint64; 0 for a 32-gram that contains an end-of-text token.

    A hash is the value of a polynomial at a fixed odd number, modulo 2⁶⁴. Each token of the 32-gram gives one
    coefficient, a random number that depends on the token id.

    Args:
        tokens: Token ids (n,).
        end_of_text: The token after each document.
    """
    codes = np.random.default_rng(0).integers(1, 1 << 63, max(int(tokens.max(initial=0)), end_of_text) + 1, np.uint64)
    hashes, base, length = codes[tokens], np.array([0x9E3779B97F4A7C15], np.uint64), 1
    ends = tokens == end_of_text
    while length < GRAM:  # the hashes of two neighbouring sequences give the hash of a sequence of twice the length
        hashes, ends = hashes[:-length] * base + hashes[length:], ends[:-length] | ends[length:]
        base, length = base * base, 2 * length
    hashes[ends] = 0
    return hashes


def overlap(test: Iterable[Tokens], training: Iterable[Tokens], end_of_text: int) -> NDArray[np.float64]:
    """Return the fraction of each test document's 32-grams that also occur in a training document.

    Args:
        test: Tokens of each shard of the test split. A shard consists of complete documents.
        training: Tokens of each shard of the training split.
        end_of_text: The token after each document.

    Returns:
        Fractions (documents,) fp64, 0 for documents of fewer than `GRAM` tokens.
    """
    tokens = np.concatenate([np.empty(0, np.uint16), *test])
    is_end = tokens == end_of_text
    documents = int(is_end.sum())
    if len(tokens) < GRAM:
        return np.zeros(documents)
    hashes = gram_hashes(tokens, end_of_text)
    in_document = hashes != 0
    document = (np.cumsum(is_end) - is_end)[: len(hashes)][in_document]  # index of each 32-gram's document
    test_hashes, hash_index = np.unique(hashes[in_document], return_inverse=True)
    is_shared = np.zeros(len(test_hashes), bool)  # whether the 32-gram also occurs in the training text
    shift = np.uint64(64 - max(16, min(30, len(test_hashes).bit_length() + 3)))
    # entry i: whether some test hash begins with the bits of i; a quick lookup that excludes most training hashes
    is_prefix = np.zeros(1 << (64 - int(shift)), bool)
    is_prefix[test_hashes >> shift] = True
    for shard in training:
        for start in range(0, len(shard) - GRAM + 1, CHUNK):
            candidates = gram_hashes(shard[start : start + CHUNK + GRAM - 1], end_of_text)
            candidates = candidates[is_prefix[candidates >> shift]]
            index = np.searchsorted(test_hashes, candidates).clip(max=len(test_hashes) - 1)
            is_shared[index[test_hashes[index] == candidates]] = True
    grams = np.bincount(document, minlength=documents)  # number of 32-grams of each document
    return np.bincount(document, is_shared[hash_index], documents) / np.maximum(grams, 1)
