"""The position of training sample k in the token stream, as a function of a seed and k.

The position does not depend on ranks, workers or steps. The only state is the number of samples so far: a resumed run
continues with the next k. Shuffling the samples of the whole corpus needs no memory, because `Permutation` computes
single entries.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from kerple.base.errors import require

ROUNDS = 8  # number of rounds of the Feistel network

Indices = NDArray[np.int64]


class Permutation:
    """A pseudorandom permutation of 0 .. size - 1. It computes single entries, by a Feistel network.

    An index is written as two digits (left, right) in base r, where r is the smallest integer with r² >= size. Each
    round adds a keyed hash of one digit to the other, modulo r. A round is invertible, so the network is a permutation
    of 0 .. r² - 1. An image of `size` or more is mapped again until it is smaller than `size` (cycle walking, Black and
    Rogaway 2002). The result is a permutation of 0 .. size - 1.

    Args:
        size: Number of entries, at least 1.
        key: Integers that choose the permutation, such as a seed and the number of a pass.
    """

    def __init__(self, size: int, *key: int) -> None:
        self.size = size
        self.radix = np.uint64(isqrt(size - 1) + 1)
        self.round_keys = [np.uint64(hash_integers(*key, step)) for step in range(ROUNDS)]

    def __call__(self, indices: Indices) -> Indices:
        """Return the images (n,) int64 of the indices (n,) int64. Both are in 0 .. size - 1."""
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
    """The position of sample k in a token stream.

    A sample is `length` + 1 consecutive tokens. The samples of one pass over the stream lie one after the other. The
    first one begins at an offset below `length`, which depends on the pass. Two neighbours share one token: the last
    target of the first and the first input of the second. A permutation for each pass determines the order in which its
    samples are read. A pass is not an epoch of `TokenShards`, which may have fewer or more samples.

    Args:
        tokens: Number of tokens in the stream.
        length: Number of targets in a sample, T.
        key: Integers that determine the order, such as the seed.

    Attributes:
        samples (int): Number of samples in a pass. Sample k belongs to pass k // samples.

    Raises:
        UserError: The stream is shorter than 2 · length, so that with some offsets no sample fits.
    """

    def __init__(self, tokens: int, length: int, *key: int) -> None:
        self.length, self.key = length, key
        # the last sample fits even with the largest offset, length - 1
        self.samples = (tokens - length) // length
        expected = f"at most {tokens // 2}, half of the training tokens; use a larger corpus or a smaller length"
        require(self.samples >= 1, "data.length", length, expected)

    def starts(self, samples: Indices) -> Indices:
        """Return the index of each sample's first token, (n,) int64. Sample k is stream[start : start + T + 1].

        Args:
            samples: Indices k of samples, (n,) int64, from 0.
        """
        passes, entries = np.divmod(samples, self.samples)
        starts = np.empty_like(entries)
        for number in np.unique(passes):
            offset, inside = hash_integers(*self.key, int(number)) % self.length, passes == number
            shuffle = Permutation(self.samples, *self.key, int(number))
            starts[inside] = offset + self.length * shuffle(entries[inside])
        return starts


class SectionOrder:
    """The position of sample k in a stream of shards, of which few are read at a time.

    A pass over the stream permutes the shards, and divides them into sections of N shards. The samples of a section are
    shuffled, and read before those of the next section. A sample lies inside one shard. The first sample of a shard
    begins at an offset below `length`, which depends on the pass.

    The samples of a section are divided into N lanes of equal size, and are taken from the lanes in turn. Every batch
    therefore has about as many samples of each lane, and a process that gets neighbouring lanes (`lane`) reads only
    their shards.

    Args:
        ends: Index after the last token of each shard.
        length: Number of targets in a sample, T.
        section_size: Number of shards in a section, N.
        key: Integers that determine the order, such as the seed.

    Attributes:
        samples (int): Number of samples in a pass. Sample k belongs to pass k // samples.
        section_samples (int): Mean number of samples in a section.

    Raises:
        UserError: No shard has 2 · length tokens.
    """

    def __init__(self, ends: Sequence[int] | Indices, length: int, section_size: int, *key: int) -> None:
        self.length, self.lanes, self.key = length, section_size, key
        begins, sizes = np.append(0, ends[:-1]).astype(np.int64), np.diff(ends, prepend=0)
        counts, largest = (sizes - length) // length, sizes.max(initial=0)
        expected = f"at most {largest // 2}, half of the tokens of the largest shard; or no data.sections"
        require(largest >= 2 * length, "data.length", length, expected)
        used = counts > 0
        self.begins, self.counts = begins[used], counts[used]
        self.samples = int(self.counts.sum())
        self.section_samples = -(-self.samples * self.lanes // len(self.counts))
        self._passes: dict[int, tuple[Indices, Indices]] = {}

    def starts(self, samples: Indices) -> Indices:
        """Return the index of each sample's first token, (n,) int64. Sample k is stream[start : start + T + 1]."""
        starts = np.empty_like(samples)
        for number, section, inside, entries in self._by_section(samples):
            shards, _ = self._pass(number)
            # in ascending order, so that a process reads the same part of the shards whatever their order in the pass
            shards = np.sort(shards[section * self.lanes : (section + 1) * self.lanes])
            shard_ends = np.cumsum(self.counts[shards])
            rounds, rest = divmod(int(shard_ends[-1]), self.lanes)
            turns, lanes = np.divmod(entries, self.lanes)
            if rounds:  # the incomplete last round is not shuffled
                shuffle, whole = Permutation(rounds, *self.key, number, section), turns < rounds
                # shifted, so that a batch does not have the same place of every lane
                turns[whole] = shuffle((turns[whole] + lanes[whole] * rounds // self.lanes) % rounds)
            places = lanes * rounds + np.minimum(lanes, rest) + turns
            index = np.searchsorted(shard_ends, places, side="right")
            within = places - (shard_ends - self.counts[shards])[index]
            offset = hash_integers(*self.key, number) % self.length
            starts[inside] = self.begins[shards[index]] + offset + self.length * within
        return starts

    def lane(self, samples: Indices) -> Indices:
        """Return the lane of each sample, (...) int64 from 0 to N - 1, from the indices (...) int64.

        The samples of neighbouring lanes are in the same shards.
        """
        lanes = np.empty_like(samples)
        for _, _, inside, entries in self._by_section(samples):
            lanes[inside] = entries % self.lanes
        return lanes

    def _by_section(self, samples: Indices) -> Iterator[tuple[int, int, NDArray[np.bool_], Indices]]:
        """Yield each pass and section that has some of the samples, their mask, and their indices in the section."""
        passes, entries = np.divmod(samples, self.samples)
        for number in map(int, np.unique(passes)):
            _, ends = self._pass(number)
            sections = np.where(passes == number, np.searchsorted(ends, entries, side="right"), -1)
            for section in map(int, np.unique(sections[sections >= 0])):
                inside = sections == section
                yield number, section, inside, entries[inside] - (ends[section - 1] if section else 0)

    def _pass(self, number: int) -> tuple[Indices, Indices]:
        """Return the order of the shards in a pass (shards,), and the index of the sample after each section."""
        if number not in self._passes:
            shards = Permutation(len(self.counts), *self.key, number)(np.arange(len(self.counts)))
            sizes = np.add.reduceat(self.counts[shards], np.arange(0, len(shards), self.lanes))
            self._passes = dict([*self._passes.items()][-1:]) | {number: (shards, np.cumsum(sizes))}
        return self._passes[number]


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of each value (n,) by a bijection, the finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@lru_cache(maxsize=4096)  # `starts` makes the permutation of a pass again in each call, from the same hashes
def hash_integers(*values: int) -> int:
    """Return a hash of integers, 0 .. 2⁶⁴ - 1, the same on every machine. Integers are first reduced modulo 2⁶⁴."""
    state = np.array([0x9E3779B97F4A7C15], dtype=np.uint64)
    for value in values:
        state = mix(state + np.uint64(0x9E3779B97F4A7C15) + mix(np.array([value % 2**64], dtype=np.uint64)))
    return int(state[0])
