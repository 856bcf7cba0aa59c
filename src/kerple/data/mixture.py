"""Mixtures: training samples from several folders of shards, or from documents of several lengths, with weights."""

import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kerple.base.errors import require
from kerple.data.evaluation_text import TextBlocks
from kerple.data.order import Indices, Order, SectionOrder, hash_integers, mix
from kerple.data.shards import Folder, Tokens, TokenStream
from kerple.model import Batch


@dataclass(frozen=True)
class Samples:
    """The training samples of a folder of shards.

    Args:
        read: Returns a batch of samples from their places.
        order: The places of samples.
        stream: The tokens of the split.
        ends: Index after the last place of a sample in each shard.
    """

    read: Callable[[Sequence[int]], Batch]
    order: Order | SectionOrder
    stream: TokenStream
    ends: Sequence[int]


class SelectedDocuments(TokenStream):
    """The documents of a split with certain lengths, as a stream of tokens.

    Args:
        stream: The tokens of the split.
        begins: Index of the first token of each document of the split, ascending.
        low: Smallest number of tokens of a selected document, with its end-of-text token.
        high: The number of tokens of a selected document is smaller than this number.

    Attributes:
        begins (NDArray): Index of the first token of each selected document in this stream.
        ends (Sequence[int]): Index after the last selected token of each shard.
    """

    def __init__(self, stream: TokenStream, begins: Indices, low: int, high: int) -> None:
        lengths = np.diff(begins, append=len(stream))
        selected = (low <= lengths) & (lengths < high)
        super().__init__(stream.folder, stream.split)
        self.stream, self.sources = stream, begins[selected]
        self.document_ends = lengths[selected].cumsum()
        self.begins = self.document_ends - lengths[selected]
        self.ends = np.append(0, self.document_ends)[self.sources.searchsorted(stream.ends)].tolist()

    def __getitem__(self, part: slice) -> Tokens:
        """Return the tokens of a slice with step 1, in the shards' dtype."""
        start, stop, _ = part.indices(len(self))
        parts: list[Tokens] = [np.empty(0, self.dtype)]
        for document in range(int(np.searchsorted(self.document_ends, start, "right")), len(self.document_ends)):
            first, last = max(start, self.begins[document]), min(stop, self.document_ends[document])
            if first >= last:
                break
            offset = self.sources[document] - self.begins[document]
            parts.append(self.stream[first + offset : last + offset])
        return np.concatenate(parts)


@dataclass(frozen=True)
class Part:
    """A part of a mixture.

    Args:
        name: Name of the part in the option ``mixture``.
        folder: The folder of its shards.
        lengths: The arguments ``low`` and ``high`` of `SelectedDocuments`; None if all documents are used.
    """

    name: str
    folder: Folder
    lengths: tuple[int, int] | None = None

    @classmethod
    def open(cls, name: str, cache: str, cache_gb: float) -> "Part":
        """Open the part with a name in the option ``mixture``.

        Args:
            name: Folder or URL of the shards, and optionally ``[LOW:HIGH]``, where either number may be missing.
            cache: See `Folder`.
            cache_gb: See `Folder`.

        Raises:
            UserError: The folder has no manifest, or a damaged one.
        """
        match = re.fullmatch(r"(.*?)(?:\[(\d*):(\d*)\])?", name, re.DOTALL)
        assert match is not None  # the pattern fits every string
        location, low, high = match.groups()
        lengths = None if low is None else (int(low or 0), int(high or sys.maxsize))
        return cls(name, Folder(location, cache, cache_gb), lengths)

    def checksum(self, split: str) -> str:
        """Return the sha256 of the tokens of a split, and the lengths of the selected documents."""
        sha256 = self.folder.manifest.splits[split].sha256
        return sha256 if self.lengths is None else f"{sha256} {self.lengths}"

    def stream(self, split: str, open_shards: int | None = None) -> TokenStream:
        """Return the tokens of a split."""
        stream = TokenStream(self.folder, split, open_shards)
        if self.lengths is None:
            return stream
        return SelectedDocuments(stream, self.folder.documents(split), *self.lengths)

    def begins(self, stream: TokenStream) -> Indices:
        """Return the index of the first token of each document of a `stream` of this part."""
        return stream.begins if isinstance(stream, SelectedDocuments) else self.folder.documents(stream.split)

    def validation_blocks(self, length: int, limit: int) -> TextBlocks:
        """Return the first blocks of the validation split, with ``length`` targets each.

        Raises:
            UserError: The split has no block.
        """
        stream = self.stream("validation")
        starts = torch.arange(max(len(stream) - 1, 0) // length)[:limit] * length
        expected = f"more than {length}; use a smaller data.length or a larger part"
        require(len(starts) > 0, "data.mixture", f"{self.name} with {len(stream)} validation tokens", expected)
        return TextBlocks(stream, starts, length)


class Mixture:
    """The samples of several parts with weights. It has the methods of an order, and reads the samples.

    A round is the smallest number of samples in which each part has a whole number of samples. Every round has exactly
    these numbers, in random order. All samples have the same number of targets, so the weights are fractions of tokens.

    Args:
        parts: The samples of each part. A part whose samples are used up starts again, in another order.
        weights: Fraction of each part in units of 1/1,000; the sum is 1,000.
        seed: Seed of the order in a round.

    Attributes:
        samples (int): Number of samples in the rounds before any part starts again.
        section_samples (int): Mean number of samples while the part with the shortest sections reads a section.
    """

    def __init__(self, parts: Sequence[Samples], weights: Sequence[int], seed: int) -> None:
        self.parts, self.seed = parts, seed
        counts = np.array(weights) // math.gcd(*weights)  # samples of each part in a round
        self.ends = counts.cumsum()
        self.begins = self.ends - counts
        self.counts, self.round = counts, int(self.ends[-1])
        by_count = [*zip([part.order for part in parts], counts.tolist(), strict=True)]
        self.samples: int = self.round * min(order.samples // count for order, count in by_count)
        sections = [(order, count) for order, count in by_count if isinstance(order, SectionOrder)]
        self.section_samples = min((order.section_samples * self.round // n for order, n in sections), default=0)

    def starts(self, samples: Indices) -> Indices:
        """Return the place of each sample (n,) int64: its place in its part, times the number of parts, plus the part.

        Args:
            samples: Indices k of samples, (n,) int64, from 0.
        """
        parts, indices = self._parts_and_indices(samples)
        places = np.empty_like(indices)
        for number, part in enumerate(self.parts):
            inside = parts == number
            places[inside] = part.order.starts(indices[inside])
        return places * len(self.parts) + parts

    def lane(self, samples: Indices) -> Indices:
        """Return the lane of each sample (n,) int64 in the sections of its part, from the indices (n,) int64."""
        parts, indices = self._parts_and_indices(samples)
        for number, part in enumerate(self.parts):
            assert isinstance(part.order, SectionOrder)
            inside = parts == number
            indices[inside] = part.order.lane(indices[inside])
        return indices

    def _parts_and_indices(self, samples: Indices) -> tuple[Indices, Indices]:
        """Return the part of each sample, and the index of the sample in its part, both (n,) int64."""
        rounds, slots = np.divmod(samples, self.round)
        numbers, index = np.unique(rounds, return_inverse=True)
        # `mix` is a bijection, so that the hashes of the slots of a round are different, and their order is random
        keys = mix(numbers.astype(np.uint64) + np.uint64(hash_integers(self.seed)))
        hashes = mix(np.add(keys[:, None], np.arange(self.round), dtype=np.uint64, casting="unsafe"))  # (rounds, slots)
        slots = hashes.argsort(axis=1)[index, slots]
        parts = np.searchsorted(self.ends, slots, "right")
        indices = rounds * self.counts[parts] + slots - self.begins[parts]
        return parts, indices

    def read(self, places: Sequence[int]) -> Batch:
        """Return the batch of the samples at these places."""
        starts, parts = np.divmod(np.array(places, np.int64), len(self.parts))
        rows = [np.flatnonzero(parts == part) for part in range(len(self.parts))]
        batches = [part.read(starts[of].tolist()) for part, of in zip(self.parts, rows, strict=True) if len(of)]
        back = torch.from_numpy(np.argsort(np.concatenate(rows)))
        return {name: torch.cat([batch[name] for batch in batches])[back] for name in batches[0]}
