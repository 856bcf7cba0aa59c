"""The position of training sample k in the token stream, as a function of a seed and k.

It does not depend on ranks, workers or steps, and there is no state: a resumed run continues with the next k. Shuffling
the samples of the whole corpus needs no memory, because `Permutation` computes single entries.
"""

from functools import lru_cache
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from kerple.base.errors import UserError

ROUNDS = 8

Indices = NDArray[np.int64]


class Permutation:
    """A keyed bijection of 0 .. size - 1 whose entries are computed one by one, by a Feistel network.

    An index is written as two digits (left, right) of a radix of about √size. Each round adds a keyed hash of one digit
    to the other. A round is invertible, so the network is a bijection of 0 .. radix² - 1. An image outside
    0 .. size - 1 is mapped again until it is inside (cycle walking, Black and Rogaway 2002), which gives a bijection of
    0 .. size - 1.

    Args:
        size: Number of entries, at least 1.
        key: Integers that choose the permutation, such as the seed and the epoch.
    """

    def __init__(self, size: int, *key: int) -> None:
        assert size >= 1
        self.size = size
        self.radix = np.uint64(isqrt(size - 1) + 1)  # the smallest whose square is at least the size
        self.round_keys = [np.uint64(hash_integers(*key, step)) for step in range(ROUNDS)]

    def __call__(self, indices: Indices) -> Indices:
        """Images (n,) int64 of the indices (n,) int64, both in 0 .. size - 1."""
        assert indices.size == 0 or (indices.min() >= 0 and indices.max() < self.size)
        images = self._feistel(indices.astype(np.uint64))
        while (outside := images >= self.size).any():
            images[outside] = self._feistel(images[outside])
        return images.astype(np.int64)

    def _feistel(self, indices: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = indices // self.radix, indices % self.radix
        for key in self.round_keys:
            left, right = right, (left + mix(right + key) % self.radix) % self.radix
        return left * self.radix + right


class Order:
    """The first token of sample k of one token stream.

    Sample k belongs to epoch k // samples, and a permutation of this epoch determines its place in the stream. A sample
    is `length` + 1 consecutive tokens. Two neighbours share one token, the last target of the first and the first input
    of the second. The first sample of an epoch begins at an offset below `length` that differs between epochs.

    Args:
        tokens: Length of the stream.
        length: Targets per sample, T.
        key: Integers that determine the order, such as the seed.

    Raises:
        UserError: The stream is too short for one sample at every offset.
    """

    def __init__(self, tokens: int, length: int, *key: int) -> None:
        self.length, self.key = length, key
        # the last sample must fit at the largest offset, length - 1, too
        self.samples = (tokens - length) // length
        if self.samples < 1:
            given = f"got {length}, which needs {2 * length} training tokens, but there are {tokens}"
            raise UserError(f"data.length: {given}; use a larger corpus or a smaller length")

    def starts(self, samples: Indices) -> Indices:
        """Indices (n,) int64 of the first tokens of the samples k (n,); sample k is stream[start : start + T + 1]."""
        epochs, entries = np.divmod(samples, self.samples)
        starts = np.empty_like(entries)
        for epoch in np.unique(epochs):
            offset = hash_integers(*self.key, int(epoch)) % self.length
            inside = epochs == epoch
            shuffle = Permutation(self.samples, *self.key, int(epoch))
            starts[inside] = offset + self.length * shuffle(entries[inside])
        return starts


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words (n,) that mixes their bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@lru_cache(maxsize=4096)  # each batch needs the keys of the permutation again
def hash_integers(*values: int) -> int:
    """A hash, 0 .. 2⁶⁴ - 1, of integers of any size and sign; it is the same on every machine."""
    state = np.array([0x9E3779B97F4A7C15], dtype=np.uint64)
    for value in values:
        state = mix(state + np.uint64(0x9E3779B97F4A7C15) + mix(np.array([value % 2**64], dtype=np.uint64)))
    return int(state[0])
