"""Best-fit packing: training samples in which only documents longer than a sample are cut.

A document of n tokens has n targets, because the input of its first target is the end-of-text token before it. As long
as T targets or more remain of it, T targets become a sample. The rest is an *item*. Items are packed by best fit
decreasing (Johnson et al. 1974; for language models Ding et al. 2024, arXiv 2404.10830): each item, the
largest first, goes to the sample with the least space in which it fits.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from kerple.base.errors import require
from kerple.data.documents import Documents, ranges
from kerple.data.order import Indices, Permutation
from kerple.data.shards import TokenStream
from kerple.model import Batch


def best_fit(sizes: Indices, capacity: int) -> Indices:
    """Assign items to bins, each to the bin with the least space in which it fits, in descending order of size.

    Items of equal size, and bins with equal space, are assigned together. The time is therefore that of sorting and of
    at most capacity² steps.

    Args:
        sizes: Sizes (items,) int64, from 1 to ``capacity``.
        capacity: Space of an empty bin.

    Returns:
        The number of the bin of each item, (items,) int64, from 0 without gaps.
    """
    bins, items, count = np.empty_like(sizes), np.argsort(-sizes, kind="stable"), 0
    bins_by_space: list[list[Indices]] = [[] for _ in range(capacity + 1)]
    spaces = 0  # bit s is set if there are bins with the space s
    ends = np.searchsorted(-sizes[items], -np.arange(capacity + 1), "right")  # number of items of each size or larger
    for size in range(capacity, 0, -1):
        rest = items[0 if size == capacity else ends[size + 1] : ends[size]]
        while len(rest):
            fitting = spaces >> size
            space = size + (fitting & -fitting).bit_length() - 1 if fitting else capacity
            per_bin = space // size
            used = -(-len(rest) // per_bin)  # largest number of bins that are needed
            if fitting:
                available = bins_by_space[space].pop()
            else:
                available, count = np.arange(count, count + used), count + used
            chosen, left = available[:used], available[used:]
            placed = rest[: len(chosen) * per_bin]
            bins[placed] = np.repeat(chosen, per_bin)[: len(placed)]
            in_last = len(placed) - (len(chosen) - 1) * per_bin
            parts = [(space, left), (space - per_bin * size, chosen[:-1]), (space - in_last * size, chosen[-1:])]
            for left_space, part in parts:
                if len(part):
                    bins_by_space[left_space].append(part)
                spaces = spaces & ~(1 << left_space) | bool(bins_by_space[left_space]) << left_space
            rest = rest[len(placed) :]
    return bins


class PackedSamples:
    """The samples of a token stream by best-fit packing.

    In a sample, the rest of a cut document that follows another document is a document of its own, whose first target
    is not scored, because its context is missing. The targets after the last document are padding and not scored.

    Args:
        stream: Tokens of the training split.
        documents: Documents of the split, and their options.
        end_of_text: Token after each document.
        length: Number of targets in a sample, T.
        seed: Seed of the order in which items of equal size are packed.
        shard_ends: Index after the last token of each shard, if the documents of each shard are packed separately.

    Attributes:
        samples (int): Number of samples.
        ends (NDArray): Index after the last number of a sample in each shard, or in the stream without ``shard_ends``.
            After the samples of each shard, one number is not used, as an order leaves out the last token of a shard.

    Raises:
        UserError: There is no document.
    """

    def __init__(
        self,
        stream: TokenStream,
        documents: Documents,
        end_of_text: int,
        length: int,
        seed: int,
        shard_ends: Sequence[int] | None = None,
    ) -> None:
        require(len(documents.begins) > 0, "data.packing", "best_fit without a training document", "a larger corpus")
        self.stream, self.mask, self.end_of_text, self.length = stream, documents.mask, end_of_text, length
        lengths = np.diff(documents.begins, append=len(stream))
        shards = documents.begins.searchsorted([0, *(shard_ends or [len(stream)])])  # first document of each shard
        wholes, rests = np.divmod(lengths, length)
        items, bins = self._pack(seed, rests, shards)
        # the parts of documents: those that are a sample, and the rests
        documents_of_wholes, numbers = ranges(np.zeros_like(wholes), wholes)
        document, offset = np.append(documents_of_wholes, items), np.append(numbers, wholes[items]) * length
        count = len(numbers)
        samples, shard = np.append(np.arange(count), count + bins), shards[1:-1].searchsorted(document, "right")
        order = np.lexsort((offset == 0, samples, shard))  # the rest of a cut document first, with its context
        first_parts = np.flatnonzero(np.diff(samples[order], prepend=-1))  # of each sample
        self.samples = len(first_parts)
        begins, is_first = (documents.begins[document] + offset)[order], (offset == 0)[order]
        sizes = np.append(np.full(count, length), rests[items])[order]
        # whether the input of the first target is in the same document
        has_context = np.zeros_like(is_first)
        has_context[first_parts] = ~is_first[first_parts]
        # the last part of a sample is its padding, with the last token, which is no input
        padding = length + 1 - np.add.reduceat(sizes, first_parts)
        self.first_parts = np.append(first_parts, len(order)) + np.arange(self.samples + 1)
        ends = self.first_parts[1:] - np.arange(1, self.samples + 1)
        self.begins, self.sizes = np.insert(begins, ends, -1), np.insert(sizes, ends, padding)
        self.has_context = np.insert(has_context, ends, False)
        self.is_scored = np.insert(has_context | (is_first & documents.score_first), ends, False)  # the first target
        self.ends = np.bincount(shard[order][first_parts], minlength=len(shards) - 1).cumsum()
        self.ends += np.arange(1, len(shards))
        cut = lengths[lengths > length]
        self.summary = (
            f"best fit: {len(cut) / len(lengths):.2%} of the training documents, with {cut.sum() / len(stream):.2%} of "
            f"the tokens, are longer than {length} tokens and cut; "
            f"{1 - len(stream) / (self.samples * length):.2%} of the targets are padding"
        )

    def _pack(self, seed: int, rests: Indices, shards: Indices) -> tuple[Indices, Indices]:
        """Return the documents that have a rest, and the bin of each rest.

        The documents from ``shards``[i] to ``shards``[i + 1] are packed separately, for each i.
        """
        items = np.flatnonzero(rests)
        bins, count = np.empty_like(items), 0
        for first, last in pairwise(items.searchsorted(shards).tolist()):
            order = first + Permutation(max(last - first, 1), seed)(np.arange(last - first))
            bins[order] = count + best_fit(rests[items[order]], self.length)
            count = int(bins[order].max(initial=count - 1)) + 1
        return items, bins

    def read(self, numbers: Sequence[int]) -> Batch:
        """Return the batch of the samples with these numbers.

        The batch has ``tokens`` (B, T + 1) int64, ``scored`` (B, T) bool, and ``documents`` if they are masked.
        """
        places = np.asarray(numbers)
        samples = places - self.ends.searchsorted(places, "right")
        first = self.first_parts[samples]
        rows, parts = ranges(first, self.first_parts[samples + 1])
        begins, sizes, has_context = self.begins[parts], self.sizes[parts], self.has_context[parts]
        stops = sizes.cumsum()
        starts = stops - sizes  # index of the first input of each part in the batch
        is_text, shape = begins >= 0, (len(samples), self.length + 1)
        scored = is_text.repeat(sizes)
        scored[starts] = self.is_scored[parts]
        tokens = np.empty(shape, np.int64)
        tokens[:, 0], cells = self.end_of_text, tokens.ravel()
        cells[ranges(starts[~is_text] + 1, stops[~is_text])[1]] = self.end_of_text  # padding
        columns = (starts + 1 - has_context, stops + 1, begins - has_context, begins + sizes)
        for start, stop, begin, end in zip(*(column[is_text].tolist() for column in columns), strict=True):
            cells[start:stop] = self.stream[begin:end]
        batch = {"tokens": torch.from_numpy(tokens)}
        if self.mask:
            documents = parts + 1 - (first + self.has_context[first])[rows]
            batch["documents"] = torch.from_numpy(documents.repeat(sizes).reshape(shape))
        return batch | {"scored": torch.from_numpy(scored.reshape(shape)[:, :-1].copy())}
