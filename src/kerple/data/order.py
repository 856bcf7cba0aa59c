"""The position of training sample k in the token streams, as a function of a seed and k.

It does not depend on ranks, workers or steps, and there is no state: a resumed run continues with the next k. Shuffling
the samples of the whole corpus needs no memory, because `Permutation` computes single entries.
"""

from functools import lru_cache
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from kerple.base.errors import UserError

ROUNDS = 8
MIXTURE_PERIOD = 4096  # number of draws in one period of a mixture

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
    of the second. The first sample of an epoch begins at an offset below `length` that differs between epochs. The
    stream has consecutive sections of equal size. Samples are taken from the sections in turn, and shuffled within a
    section.

    Args:
        tokens: Length of the stream.
        length: Targets per sample, T.
        key: Integers that determine the order: the seed, and the index of the corpus in a mixture.
        sections: Number of sections.

    Raises:
        UserError: The stream is too short for one sample at every offset.
    """

    def __init__(self, tokens: int, length: int, *key: int, sections: int = 1) -> None:
        self.length, self.key, self.sections = length, key, sections
        # the last sample must fit at the largest offset, length - 1, too
        self.section_samples = (tokens - length) // length // sections
        self.samples = self.section_samples * sections
        if self.samples < 1:
            given = f"got {length}, which needs {(sections + 1) * length} training tokens, but there are {tokens}"
            raise UserError(f"data.length: {given}; use a larger corpus, a smaller length, or fewer data.sections")

    def starts(self, samples: Indices) -> Indices:
        """Indices (n,) int64 of the first tokens of the samples k (n,); sample k is stream[start : start + T + 1]."""
        epochs, entries = np.divmod(samples, self.samples)
        entries, sections = np.divmod(entries, self.sections)
        starts = np.empty_like(entries)
        for epoch in np.unique(epochs):
            offset = hash_integers(*self.key, int(epoch)) % self.length
            inside = epochs == epoch
            shuffle = Permutation(self.section_samples, *self.key, int(epoch))
            places = sections[inside] * self.section_samples + shuffle(entries[inside])
            starts[inside] = offset + self.length * places
        return starts


class Mixture:
    """The stream of sample k and its first token in it, for several streams with weights.

    A period of `MIXTURE_PERIOD` draws contains each stream in proportion to its weight, rounded by the method of
    largest remainders, in shuffled order. The stream of sample k and its number in that stream follow from k without a
    state. Each stream begins its next epoch when its samples are used up, independently of the others. A draw takes
    one sample, or one sample of each section if the streams have sections.

    Args:
        orders: The order of each stream.
        weights: Weight of each stream, positive; they need not add up to 1.
        seed: Seed of the shuffle.

    Raises:
        UserError: The weights are not positive, finite and one per stream, or one is below 1 / `MIXTURE_PERIOD`.
    """

    def __init__(self, orders: list[Order], weights: list[float], seed: int) -> None:
        if len(weights) != len(orders) or any(not w > 0 or not np.isfinite(w) for w in weights):
            raise UserError(f"data.mixture: got weights {weights}, expected a positive number for each corpus")
        self.orders, self.seed, self.sections = orders, seed, orders[0].sections
        exact = np.array(weights) / sum(weights) * MIXTURE_PERIOD
        self.quota = np.floor(exact).astype(np.int64)
        largest = np.argsort(self.quota - exact, kind="stable")[: MIXTURE_PERIOD - self.quota.sum()]
        self.quota[largest] += 1
        if (self.quota == 0).any():
            raise UserError(f"data.mixture: got weights {weights}, expected fractions of at least 1/{MIXTURE_PERIOD}")
        self.first = np.concatenate([[0], np.cumsum(self.quota)])

    def streams_and_starts(self, samples: Indices) -> tuple[Indices, Indices]:
        """Indices of the streams (n,) of the samples k (n,), and of their first tokens (n,) in these streams."""
        if len(self.orders) == 1:
            return np.zeros_like(samples), self.orders[0].starts(samples)
        draws, sections = np.divmod(samples, self.sections)
        periods, slots = np.divmod(draws, MIXTURE_PERIOD)
        for period in np.unique(periods):
            inside = periods == period
            slots[inside] = Permutation(MIXTURE_PERIOD, self.seed, int(period))(slots[inside])
        streams = np.searchsorted(self.first, slots, side="right") - 1
        # index of the sample in its stream
        numbers = (periods * self.quota[streams] + slots - self.first[streams]) * self.sections + sections
        starts = np.empty_like(samples)
        for stream in np.unique(streams):
            inside = streams == stream
            starts[inside] = self.orders[stream].starts(numbers[inside])
        return streams, starts


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
