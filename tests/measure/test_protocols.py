"""Protocols and blocks of documents against loops, and sums of losses."""

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from kerple.base.errors import UserError
from kerple.data.evaluation_text import Text, TextBlocks
from kerple.measure import protocols
from kerple.measure.attention import AttentionMaps, AttentionStatistics
from kerple.measure.extrapolation import Extrapolation
from kerple.measure.loss_metrics import TokenLoss
from kerple.measure.measure import Measure
from kerple.measure.protocols import Protocol, ProtocolName, full, sliding, windowed
from kerple.measure.receptive_field import ReceptiveField
from kerple.measure.shift import ShiftTest
from kerple.model import Transformer
from kerple.model.network import SupportsWindows
from kerple.positions import KerpleLog, Position, RoPE, Shape
from kerple.positions.visibility import EVERYTHING, Visibility

VOCABULARY = 23


def network_of(length: int = 8, strategy: type[Position] = KerpleLog) -> Transformer:
    network = Transformer(Shape(16, 2, length), 2, VOCABULARY, strategy)
    for parameter in network.parameters():  # with almost uniform predictions, a wrong context has no effect
        parameter.data.mul_(6 if parameter.ndim > 1 else 1)
    return network.eval().requires_grad_(False)


def tokens_of(block: int, blocks: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (blocks, block + 1), generator=torch.Generator().manual_seed(1))


def loss_of_one(network: Transformer, tokens: Tensor, start: int, target: int, window: int | None = None) -> float:
    """Return the loss of token ``target + 1`` given tokens start..target of a block (N+1,), by a softmax in fp64."""
    logits = network(tokens[None, start : target + 1], Visibility(window))[0, -1].double()
    return -float(logits[tokens[target + 1]] - logits.exp().sum().log())


class Counter(SupportsWindows):
    """A network whose loss of a target is the target itself, so that losses show which targets were scored."""

    name, training_length = "Counter", None

    def __init__(self) -> None:
        self.forwards: list[tuple[int, int]] = []  # rows and inputs of each forward pass

    def losses(self, tokens: Tensor, last: int | None = None, visibility: Visibility = EVERYTHING) -> Tensor:
        assert last is None or last <= tokens.shape[1] - 1
        self.forwards.append((tokens.shape[0], tokens.shape[1] - 1))
        targets = tokens[:, 1:].float()
        return targets if last is None else targets[:, -last:]


@pytest.mark.parametrize(
    ("length", "block", "window"), [(8, 48, None), (20, 53, None), (8, 48, 3), (20, 48, 1), (20, 48, 8)]
)
def test_full_and_windowed_equal_a_loop_over_targets(length: int, block: int, window: int | None) -> None:
    network, tokens = network_of(), tokens_of(block, blocks=2)
    expected = [[loss_of_one(network, row, t // length * length, t, window) for t in range(block)] for row in tokens]
    losses = full(network, tokens, length) if window is None else windowed(network, tokens, length, Visibility(window))
    torch.testing.assert_close(losses, torch.tensor(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("length", "stride", "skip"), [(8, 3, 5), (12, 12, 20), (20, 7, 0), (47, 4, 5)])
def test_sliding_equals_a_loop_over_steps(length: int, stride: int, skip: int) -> None:
    network, tokens, block = network_of(), tokens_of(48), 48
    expected, end = [], max(length, min(skip + stride, block))
    first = skip
    while first < block:  # each step reads `length` tokens before `end`, and scores the targets from `first` on
        expected += [loss_of_one(network, tokens[0], end - length, t) for t in range(first, end)]
        first, end = end, min(end + stride, block)
    actual = sliding(network, tokens, length, stride=stride, skip=skip)
    torch.testing.assert_close(actual[0], torch.tensor(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("length", "k"), [(8, 8), (20, 3)])
def test_last_scores_the_end_of_every_whole_segment(length: int, k: int) -> None:
    network, tokens = network_of(), tokens_of(48)
    ends = range(length, 49, length)
    expected = [loss_of_one(network, tokens[0], end - length, t) for end in ends for t in range(end - k, end)]
    actual = Protocol("last", k=k)(network, tokens, length)
    torch.testing.assert_close(actual[0], torch.tensor(expected), rtol=1e-6, atol=1e-6)
    assert Protocol("last", k=k).scored_targets(length, 48).tolist() == [t for end in ends for t in range(end - k, end)]


@pytest.mark.parametrize("protocol", ["full", "windowed", "keep_first", "sliding", "last", "per_position"])
def test_no_protocol_shows_a_key_of_another_document(protocol: ProtocolName) -> None:
    """Each document of a segment is a separate input, whose first token is the end-of-text token before it."""
    network, begins = network_of(), [0, 5, 6, 21, 30]
    text = Text(torch.cat([tokens_of(48)[0], torch.zeros(3)]).long(), begins, mask_documents=True)
    blocks = text.blocks(48)
    tokens, documents = blocks[0][None], blocks.document_options(0)["documents"]
    first = [max([0] + [b - 1 for b in begins[1:] if b - 1 <= t]) for t in range(49)]
    assert documents[0].diff().nonzero().flatten().tolist() == [b - 2 for b in begins[1:]]
    options: dict = {"windowed": {"visibility": Visibility(4)}, "keep_first": {"visibility": Visibility(3, 2)}}
    options |= {"sliding": {"stride": 5, "skip": 15}, "last": {"k": 6}}
    case = Protocol(protocol, **options.get(protocol, {}))
    ends = {t: t // 20 * 20 for t in range(48)}  # first token of the segment of a target
    if protocol == "sliding":
        ends = {t: max(0, min(20 + -(-(t - 19) // 5) * 5, 48) - 20) for t in range(15, 48)}
    expected = []
    for t in case.scored_targets(20, 48).tolist():
        logits = network(tokens[:, max(ends[t], first[t]) : t + 1], case.visibility)[0, -1].double()
        expected.append(-float(logits.log_softmax(-1)[tokens[0, t + 1]]))
    losses = case(network, tokens, 20, documents=documents)
    torch.testing.assert_close(losses[0], torch.tensor(expected), rtol=1e-5, atol=1e-5)
    assert (losses - case(network, tokens, 20)).abs().max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    "measure",
    [
        Extrapolation([4, 8], ["full", "sliding"], stride=2, blocks=2),
        ShiftTest(shifts=(0, 3), length=8, blocks=2),
        ReceptiveField(length=8, blocks=2),
        AttentionStatistics(length=8, blocks=2),
        AttentionMaps(length=8),
    ],
    ids=lambda measure: measure.name,
)
def test_measures_give_the_documents_of_a_masked_text_to_the_network(measure: Measure, monkeypatch) -> None:
    text, seen, features = Text(tokens_of(48)[0], [0, 5, 6, 21, 30], mask_documents=True), [], Transformer.features

    def watched(*args: Any, **options: Any) -> Tensor:
        seen.append(options.get("documents"))
        return features(*args, **options)

    monkeypatch.setattr(Transformer, "features", watched)
    measure.run(network_of(), text)
    assert seen
    assert all(documents is not None for documents in seen)
    assert any((documents.diff() == 1).any() for documents in seen)


def test_masked_documents_must_be_known_and_supported() -> None:
    with pytest.raises(UserError, match="mask_documents: got true, expected false without `begins`"):
        Text(torch.zeros(9), mask_documents=True)
    text = Text(torch.zeros(99).long(), [0, 50], mask_documents=True)
    with pytest.raises(UserError, match=r"Extrapolation: got a network Counter, .*SupportsDocuments.*mask_documents"):
        Extrapolation([4], protocols=["full"]).run(Counter(), text)
    network = network_of()
    network.bos = 0
    with pytest.raises(UserError, match=r"^data.mask_documents: got true, expected false for a model that adds BOS"):
        Extrapolation([4], protocols=["full"]).check(network, text)


UNSKIPPED = [Protocol("full"), Protocol("windowed", Visibility(3)), Protocol("sliding", stride=3)]
SKIPPED = [Protocol("sliding", stride=4, skip=skip) for skip in (1, 16, 31)]


@pytest.mark.parametrize("protocol", UNSKIPPED + SKIPPED)
@pytest.mark.parametrize("length", [4, 7, 16, 31, 32])
def test_every_target_after_skip_is_scored_exactly_once_at_every_length(protocol: Protocol, length: int) -> None:
    assert protocol(Counter(), torch.arange(33)[None], length)[0].tolist() == list(range(protocol.skip + 1, 33))
    assert protocol.scored_targets(length, 32).tolist() == list(range(protocol.skip, 32))


@pytest.mark.parametrize("skip", [0, 32])
def test_sliding_by_the_whole_length_equals_full(skip: int) -> None:
    network, tokens = network_of(length=16), tokens_of(48)
    expected = full(network, tokens, 16)[:, skip:]
    torch.testing.assert_close(sliding(network, tokens, 16, stride=16, skip=skip), expected)
    protocol = Protocol("sliding", stride=16, skip=skip)
    assert torch.equal(protocol(network, tokens, 16), expected)
    assert protocol.part_of_full(16)
    assert not protocol.part_of_full(32)
    assert not Protocol("sliding", stride=16, skip=skip + 1).part_of_full(16)
    assert not torch.allclose(sliding(network, tokens, 16, stride=4, skip=skip), expected)


@pytest.mark.parametrize("budget", [1, 24])
def test_losses_do_not_depend_on_the_segments_in_a_forward_pass(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    network, tokens = network_of(), tokens_of(48, blocks=2)
    expected = [protocol(network, tokens, 8) for protocol in UNSKIPPED]
    monkeypatch.setattr(protocols, "TOKENS_PER_FORWARD", budget)
    for protocol, losses in zip(UNSKIPPED, expected, strict=True):
        torch.testing.assert_close(protocol(network, tokens, 8), losses, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("length", "budget"), [(4, 16), (32, 16), (8, 20)])
def test_the_tokens_of_a_forward_pass_are_bounded(length: int, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocols, "TOKENS_PER_FORWARD", budget)
    for protocol in (Protocol("full"), Protocol("sliding", stride=3), Protocol("last", k=2)):
        counter = Counter()
        protocol(counter, torch.arange(65)[None].repeat(3, 1), length)
        assert all(rows * size <= max(budget, length) for rows, size in counter.forwards)
        if protocol.name == "full":  # as many segments as the bound allows
            assert max(rows for rows, _ in counter.forwards) == max(1, budget // length)


COUNTING = np.arange(300, dtype=np.uint16)  # tokens that are equal to their indices


def document_starts(begins: list[int], length: int) -> list[tuple[int, int]]:
    """Return the document and the first token of each block of ``length`` targets inside a document."""
    spans = enumerate(zip(begins, [*begins[1:], len(COUNTING)], strict=True))
    return [(document, start) for document, (begin, end) in spans for start in range(begin, end - length, length)]


def starts_of(blocks: TextBlocks) -> list[tuple[int, int]]:
    """Return the document and the first token of each of these blocks."""
    return list(zip(blocks.documents.tolist(), blocks.starts.tolist(), strict=True))


@pytest.mark.parametrize("length", [1, 7, 30, 100])
def test_blocks_tile_each_document_and_cross_no_border(length: int) -> None:
    begins = [0, 1, 3, 40, 40, 75, 106, 207]  # one document is empty
    text, expected = Text(COUNTING, begins), document_starts(begins, length)
    blocks = text.document_blocks(length)
    assert starts_of(blocks) == expected
    assert [block.tolist() for block in blocks] == [list(range(start, start + length + 1)) for _, start in expected]
    assert blocks[0].dtype == torch.int64
    with pytest.raises(IndexError):
        blocks[len(blocks)]
    assert starts_of(text.document_blocks(length, limit=1)) == expected[:1]
    text.table = pd.DataFrame({"overlap": [0.5, 0.6] * 4})
    allowed = text.document_blocks(length, overlap=0.5)
    assert starts_of(allowed) == [(document, start) for document, start in expected if document % 2 == 0]
    assert allowed.left_out == len({document for document, _ in expected if document % 2})


@pytest.mark.parametrize(("per_group", "per_document"), [(None, 2), (4, None), (3, 2), (2, 1)])
def test_the_numbers_of_blocks_of_groups_and_documents_are_limited(per_group, per_document):
    begins, groups, copied = [0, 1, 25, 40, 75, 106, 150, 207, 250], "xyxxyzxzy", 2  # one document is training text
    text = Text(COUNTING, begins)
    text.table = pd.DataFrame({"group": list(groups), "overlap": [0.9 * (i == copied) for i in range(9)]})
    expected: list[tuple[int, int]] = []
    for document, start in document_starts(begins, 10):
        documents = [other for other, _ in expected if groups[other] == groups[document]]
        if document != copied and len(documents) != per_group and documents.count(document) != per_document:
            expected.append((document, start))
    assert starts_of(text.document_blocks(10, None, 0.5, per_group, per_document)) == expected
    with pytest.raises(UserError, match=r"blocks_per_group: got 5, but the group x has only 4 blocks of"):
        text.document_blocks(10, None, 0.5, 5, 2)
    assert starts_of(Text(COUNTING[:30], [0, 5]).document_blocks(20, per_group=1)) == [(1, 5)]


def test_perplexity_is_the_exponential_of_the_total_mean_not_a_mean_of_means() -> None:
    loss = TokenLoss()
    loss.update(torch.tensor([6.0, 4.0]), 0, torch.tensor([3, 0]))  # updates of unequal size
    loss.update(torch.ones(6), 0, torch.tensor([1, 2, 3, 4, 5, 6]))
    assert float(loss.perplexity()) == pytest.approx(math.exp(16 / 8), rel=1e-12)
    assert float(loss.bits_per_byte()) == pytest.approx(16 / math.log(2) / 24, rel=1e-12)


def test_sums_are_fp64_and_counts_are_integers() -> None:
    losses, loss = torch.full((3, 2**20), 7.1), TokenLoss()  # an fp32 sum of these is wrong in the fourth digit
    loss.update(losses, 0)
    assert float(loss.nll) == pytest.approx(losses.numel() * float(losses[0, 0]), rel=1e-14)
    assert loss.targets.tolist() == [losses.numel()]
    assert (loss.nll.dtype, loss.targets.dtype) == (torch.float64, torch.int64)


def test_groups_without_targets_have_no_row() -> None:
    loss = TokenLoss(3)  # such as blocks of which the second has no key token of LongPPL
    loss.update(torch.ones(2), 0)
    loss.update(torch.ones(5), 2)
    assert [(row.block, row.count) for row in loss.rows("longppl", 16)] == [(0, 2), (2, 5)]


@pytest.mark.parametrize("distances", ["capped", "cache"])
@torch.inference_mode()
def test_keep_first_has_the_distances_of_its_option(distances: str) -> None:
    network, text = network_of(8, RoPE), Text(tokens_of(32)[0])
    options = {"protocols": ["full", "keep_first"], "window": 4, "keep_first": 2, "distances": distances}
    result = Extrapolation([8, 32], **options).run(network, text)
    (sum_of_block,) = [r.sum for r in result.sums if (r.protocol, r.length) == (f"keep_first2_{distances}", 32)]
    expected = network.losses(tokens_of(32), visibility=Visibility(4, 2, distances))
    assert sum_of_block == pytest.approx(float(expected.double().sum()), rel=1e-9)
    with pytest.raises(UserError, match=f"distances: got {distances}, expected true, because keep_first is not"):
        Extrapolation([8], ["full"], distances=distances)
