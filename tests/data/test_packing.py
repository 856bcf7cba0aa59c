"""Best-fit packing against plain loops."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

from kerple.base.errors import UserError
from kerple.data.documents import Documents
from kerple.data.order import SectionOrder
from kerple.data.packing import PackedSamples, best_fit

END = 99


def plain_best_fit(sizes: list[int], capacity: int) -> list[int]:
    """Return the space that is left in each bin: each item, largest first, goes to the fullest bin in which it fits."""
    spaces: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [(space, i) for i, space in enumerate(spaces) if space >= size]
        if fitting:
            spaces[min(fitting)[1]] -= size
        else:
            spaces.append(capacity - size)
    return sorted(spaces)


def test_best_fit_fills_bins_as_a_plain_algorithm():
    random = np.random.default_rng(0)
    for _ in range(150):
        capacity, count = random.integers(1, 40), random.integers(0, 100)
        sizes = random.geometric(random.uniform(0.05, 0.9), count).clip(1, capacity)
        bins = best_fit(sizes, int(capacity))
        spaces = capacity - np.bincount(bins, sizes).astype(int)
        assert sorted(spaces.tolist()) == plain_best_fit(sizes.tolist(), int(capacity))


def corpus(lengths: list[int]) -> list[list[int]]:
    """Return documents of these lengths, in which no token occurs twice, so that a token shows its place."""
    return [list(range(100 + end - n, 100 + end)) for end, n in zip(np.cumsum(lengths), lengths, strict=True)]


def packed(
    texts: list[list[int]],
    length: int = 10,
    seed: int = 5,
    shard_ends: list[int] | None = None,
    **options: bool,
) -> PackedSamples:
    stream = np.array([token for text in texts for token in text])
    begins = np.cumsum([0, *map(len, texts)])[:-1]
    return PackedSamples(stream, Documents(begins, **options), END, length, seed, shard_ends)  # type: ignore[arg-type]


@pytest.mark.parametrize("score_first", [True, False])
def test_each_target_is_in_one_sample_and_only_long_documents_are_cut(score_first):
    lengths = [*np.random.default_rng(1).geometric(0.08, 200).tolist(), 1, 10, 11, 20, 45, 10]
    texts, length = corpus(lengths), 10
    samples = packed(texts, length, score_first=score_first)
    expected = Counter(tuple(text[i : i + length]) for text in texts for i in range(0, len(text), length))
    before = {text[i]: text[i - 1] for text in texts for i in range(length, len(text), length)}  # cuts
    batch = samples.read(range(samples.samples))
    found, padding = Counter(), 0
    columns = (batch[name].tolist() for name in ("tokens", "documents", "scored"))
    for tokens, documents, scored in zip(*columns, strict=True):
        for document in dict.fromkeys(documents[:-1]):
            inputs = [i for i in range(length) if documents[i] == document]
            targets = tuple(tokens[i + 1] for i in inputs)
            is_scored = [scored[i] for i in inputs]
            if targets not in expected:
                assert set(targets) == {END}
                assert not any(is_scored)
                padding += len(targets)
                continue
            found[targets] += 1
            if inputs[0] == 0:
                assert tokens[0] == before.get(targets[0], END)
            # the first target of a rest has its context only at the beginning of a sample
            first = inputs[0] == 0 if targets[0] in before else score_first
            assert is_scored == [first] + [True] * (len(targets) - 1)
    assert found == expected
    assert padding == samples.samples * length - sum(lengths)
    cut = [n for n in lengths if n > length]
    assert (
        f"{len(cut) / len(lengths):.2%} of the training documents, with {sum(cut) / sum(lengths):.2%}"
        in samples.summary
    )
    assert f"{padding / samples.samples / length:.2%} of the targets are padding" in samples.summary


def test_the_packing_is_a_function_of_lengths_length_and_seed():
    texts = corpus(np.random.default_rng(2).geometric(0.1, 300).tolist())

    def contents(**options: int) -> list[tuple[int, ...]]:
        samples = packed(texts, **options)
        return sorted(map(tuple, samples.read(range(samples.samples))["tokens"].tolist()))

    first, other = contents(), contents(seed=6)
    assert first != other
    assert contents() == first


def test_with_sections_each_shard_is_packed_separately():
    texts, cuts = corpus(np.random.default_rng(3).geometric(0.08, 90).tolist()), [0, 20, 20, 21, 60, 90]
    shards = [texts[first:last] for first, last in pairwise(cuts)]
    shard_ends = np.cumsum([sum(map(len, shard)) for shard in shards]).tolist()
    together = packed(texts, shard_ends=shard_ends)
    alone = [packed(shard) if shard else None for shard in shards]
    assert together.samples == sum(shard.samples for shard in alone if shard)
    order = SectionOrder(together.ends, 1, 2, 5)
    places = order.starts(np.arange(2 * order.samples)).reshape(2, -1)  # two passes
    sections = [np.searchsorted(together.ends, row, "right").tolist() for row in places]
    for row, sections_of_row in zip(places, sections, strict=True):
        assert len(set(row)) == together.samples
        for first, last in ((0, 2), (2, 4)):  # shards are read in sections of two
            in_order = [*dict.fromkeys(sections_of_row)][first:last]
            found = [k for k, shard in enumerate(sections_of_row) if shard in in_order]
            assert found == list(range(found[0], found[0] + len(found)))
    for number, shard in enumerate(alone):
        inside = np.sort(places[0][np.array(sections[0]) == number])
        assert len(inside) == (shard.samples if shard else 0)
        if shard:
            batch, expected = together.read(inside.tolist()), shard.read(range(shard.samples))
            assert batch.keys() == expected.keys()
            assert all(torch.equal(values, expected[name]) for name, values in batch.items())


def test_a_split_without_documents_is_refused():
    with pytest.raises(UserError, match=r"^data.packing: got best_fit without a training document, expected a larger"):
        packed([])
