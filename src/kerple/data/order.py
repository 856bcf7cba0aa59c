"""Which tokens sample k is: a pure function of a seed and k.

Nothing here knows of ranks, workers or steps, and nothing is drawn one after the other: to resume is to go on with the
next k. The shuffle runs over the whole corpus and costs no memory, because it is computed instead of stored.
"""

import numpy as np
from numpy.typing import NDArray

from kerple.errors import UserError

ROUNDS = 8
MIXTURE_PERIOD = 4096  # samples after which every component of a mixture has had exactly its share

Indices = NDArray[np.int64]


class Permutation:
    """A keyed bijection of 0 .. size - 1, evaluated entry by entry (a Feistel network over mixed radices).

    An index is written as (left, right) with two radices of about √size; each round adds a keyed hash of one half to
    the other, which can be undone, so the whole is a bijection of 0 .. radix² - 1. Indices that land at or beyond
    `size` are sent through again (cycle walking, Black and Rogaway 2002), which keeps it one on 0 .. size - 1.

    Args:
        size: Number of entries, at least 1.
        key: Integers that choose the permutation, such as seed and epoch.
    """

    def __init__(self, size: int, *key: int) -> None:
        assert size >= 1
        self.size = size
        self.radix = np.uint64(int(np.ceil(np.sqrt(size))) + (int(np.ceil(np.sqrt(size))) ** 2 < size))
        self.round_keys = [np.uint64(hash_integers(*key, step)) for step in range(ROUNDS)]

    def __call__(self, indices: Indices) -> Indices:
        """Entries (n,) int64 in 0 .. size - 1 to their places (n,) int64 in the same range."""
        assert indices.size == 0 or (indices.min() >= 0 and indices.max() < self.size)
        places = self._round_trip(indices.astype(np.uint64))
        while (outside := places >= self.size).any():
            places[outside] = self._round_trip(places[outside])
        return places.astype(np.int64)

    def _round_trip(self, indices: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = indices // self.radix, indices % self.radix
        for key in self.round_keys:
            left, right = right, (left + mix(right + key) % self.radix) % self.radix
        return left * self.radix + right


class Order:
    """Sample k of a token stream: epoch k // samples, and in it a place that a permutation of that epoch gives.

    A sample is `length` + 1 consecutive tokens; neighbours share the one token that is target of the first and input
    of the second. Each epoch cuts the stream at another phase, so a second epoch does not repeat the cuts of the first.

    Args:
        tokens: Length of the stream.
        length: Targets per sample, T.
        key: Integers that choose the order: the seed, and what tells one corpus of a mixture from another.
        chunk: Tokens of a shard where few of them can be at hand at a time: the shards are shuffled, and the samples
            of `together` shards among each other; no sample then lies in two shards. None: all samples of the stream.
        together: Shards whose samples are shuffled together.

    Raises:
        UserError: The stream is too short for one sample at every phase.
    """

    def __init__(self, tokens: int, length: int, *key: int, chunk: int | None = None, together: int = 1) -> None:
        self.length, self.key, self.chunk, self.together = length, key, chunk or max(tokens, 1), together
        full, rest = divmod(tokens, self.chunk)
        self.full = full  # chunks; what is left of the stream beside them makes up one more, which comes last
        # so that the last sample fits at the largest phase, length - 1
        self.per_chunk = max(self.chunk - length, 0) // length
        self.samples = full * self.per_chunk + max(rest - length, 0) // length
        if self.samples < 1:
            raise UserError(
                f"data.length: {length} needs at least {2 * length} training tokens, there are {tokens}; use a larger "
                "corpus, a larger share for the training split, or a smaller length"
            )

    def starts(self, samples: Indices) -> Indices:
        """Sample numbers k (n,) to offsets (n,) int64 into the stream; sample k is stream[start : start + T + 1]."""
        epochs, entries = np.divmod(samples, self.samples)
        starts = np.empty_like(entries)
        for epoch in np.unique(epochs):
            phase = hash_integers(*self.key, int(epoch)) % self.length
            inside = epochs == epoch
            starts[inside] = phase + self._places(entries[inside], int(epoch))
        return starts

    def _places(self, entries: Indices, epoch: int) -> Indices:
        """Entries of an epoch to tokens, before the phase."""
        if self.full <= 1:
            return self.length * Permutation(self.samples, *self.key, epoch)(entries)
        group_size = self.together * self.per_chunk
        groups, inside = np.divmod(entries, group_size)
        for group in np.unique(groups):
            own = groups == group
            size = min(group_size, self.samples - int(group) * group_size)
            inside[own] = Permutation(size, *self.key, epoch, 1 + int(group))(inside[own])
        slots, samples = np.divmod(groups * group_size + inside, self.per_chunk)
        chunks = slots.copy()
        chunks[slots < self.full] = Permutation(self.full, *self.key, epoch, 0)(slots[slots < self.full])
        return chunks * self.chunk + samples * self.length


class Mixture:
    """Sample k of several streams, each taking its share of the samples.

    Every `MIXTURE_PERIOD` samples hold each stream exactly as often as its weight says (largest remainders), shuffled;
    so sample k belongs to a stream, and is a certain sample of it, by arithmetic alone. A stream that is used up begins
    its next epoch while the others go on.

    Args:
        orders: One order a stream.
        weights: Shares, positive, of any sum.
        seed: Chooses the shuffle.
    """

    def __init__(self, orders: list[Order], weights: list[float], seed: int) -> None:
        if len(weights) != len(orders) or any(not w > 0 or not np.isfinite(w) for w in weights):
            raise UserError(f"mixture: weights must be positive and finite, one for each corpus, got {weights}")
        self.orders, self.seed = orders, seed
        exact = np.array(weights) / sum(weights) * MIXTURE_PERIOD
        self.quota = np.floor(exact).astype(np.int64)
        largest = np.argsort(self.quota - exact, kind="stable")[: MIXTURE_PERIOD - self.quota.sum()]
        self.quota[largest] += 1
        if (self.quota == 0).any():
            raise UserError(f"mixture: a share below 1/{MIXTURE_PERIOD} is never drawn, got weights {weights}")
        self.first = np.concatenate([[0], np.cumsum(self.quota)])

    def locate(self, samples: Indices) -> tuple[Indices, Indices]:
        """Sample numbers k (n,) to the stream of each (n,) and its start there (n,)."""
        if len(self.orders) == 1:
            return np.zeros_like(samples), self.orders[0].starts(samples)
        periods, slots = np.divmod(samples, MIXTURE_PERIOD)
        for period in np.unique(periods):
            inside = periods == period
            slots[inside] = Permutation(MIXTURE_PERIOD, self.seed, int(period))(slots[inside])
        streams = np.searchsorted(self.first, slots, side="right") - 1
        own = periods * self.quota[streams] + slots - self.first[streams]  # the stream's own sample number
        starts = np.empty_like(samples)
        for stream in np.unique(streams):
            inside = streams == stream
            starts[inside] = self.orders[stream].starts(own[inside])
        return streams, starts


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words with good avalanche."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def hash_integers(*values: int) -> int:
    """One 64-bit word from integers of any size and sign, the same on every machine."""
    state = np.array([0x9E3779B97F4A7C15], dtype=np.uint64)
    for value in values:
        state = mix(state + np.uint64(0x9E3779B97F4A7C15) + mix(np.array([value % 2**64], dtype=np.uint64)))
    return int(state[0])
