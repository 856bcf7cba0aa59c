"""Protocols against a loop that scores one target at a time, and against the mistakes of public evaluators."""

import pytest
import torch
from torch import Tensor

from kerple import positions
from kerple.evaluation import protocols
from kerple.evaluation.protocols import Protocol, full, sliding, windowed
from kerple.model import Transformer
from kerple.positions import Shape

VOCABULARY = 23


def network_of(name: str = "KerpleLog", length: int = 8) -> Transformer:
    torch.manual_seed(0)
    network = Transformer(
        Shape(16, 2, length), 2, VOCABULARY, lambda s: positions.build(name, dim=s.dim, heads=s.heads, length=s.length)
    )
    for parameter in network.parameters():  # far from uniform predictions, or a wrong context would hardly show
        parameter.data.mul_(6 if parameter.ndim > 1 else 1)
    return network.eval().requires_grad_(False)


def tokens_of(block: int, blocks: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (blocks, block + 1), generator=torch.Generator().manual_seed(1))


def loss_of_one(network: Transformer, tokens: Tensor, start: int, target: int, window: int | None = None) -> float:
    """Loss of token ``target + 1`` given tokens start..target of one block (N+1,), by a softmax written out in fp64."""
    logits = network(tokens[None, start : target + 1], window=window)[0, -1].double()
    return -float(logits[tokens[target + 1]] - logits.exp().sum().log())


class Counter:
    """A network whose loss of a target is the target itself: a list of losses says which targets were scored."""

    def __init__(self) -> None:
        self.forwards: list[tuple[int, int]] = []

    def losses(self, tokens: Tensor, offset: int = 0, window: int | None = None, last: int | None = None) -> Tensor:
        assert offset == 0
        assert last is None or last <= tokens.shape[1] - 1
        self.forwards.append((tokens.shape[0], tokens.shape[1] - 1))
        targets = tokens[:, 1:].float()
        return targets if last is None else targets[:, -last:]


@pytest.mark.parametrize(("length", "block"), [(8, 48), (12, 53), (20, 48), (48, 53)])
def test_full_is_the_loop_over_segments(length: int, block: int) -> None:
    network, tokens = network_of(), tokens_of(block, blocks=2)
    expected = [[loss_of_one(network, row, t // length * length, t) for t in range(block)] for row in tokens]
    torch.testing.assert_close(full(network, tokens, length), torch.tensor(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("length", "window"), [(8, 3), (20, 1), (20, 8), (48, 3)])
def test_windowed_is_the_loop_over_segments_with_a_mask(length: int, window: int) -> None:
    network, tokens = network_of(), tokens_of(48)
    expected = [loss_of_one(network, tokens[0], t // length * length, t, window) for t in range(48)]
    actual = windowed(network, tokens, length, window=window)
    torch.testing.assert_close(actual[0], torch.tensor(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("length", "stride", "skip"), [(8, 1, 0), (8, 3, 5), (12, 12, 20), (20, 7, 0), (20, 7, 20), (47, 4, 5), (48, 5, 0)]
)
def test_sliding_is_the_loop_over_steps(length: int, stride: int, skip: int) -> None:
    network, tokens, block = network_of(), tokens_of(48), 48
    expected, end = [], max(length, min(skip + stride, block))
    first = skip
    while first < block:  # each step ends at `end`, sees `length` tokens and scores what no step scored before
        expected += [loss_of_one(network, tokens[0], end - length, t) for t in range(first, end)]
        first, end = end, min(end + stride, block)
    actual = sliding(network, tokens, length, stride=stride, skip=skip)
    torch.testing.assert_close(actual[0], torch.tensor(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("length", "k"), [(8, 1), (8, 8), (20, 3), (48, 5)])
def test_last_is_the_end_of_every_whole_segment(length: int, k: int) -> None:
    network, tokens = network_of(), tokens_of(48)
    ends = range(length, 49, length)
    expected = [loss_of_one(network, tokens[0], end - length, t) for end in ends for t in range(end - k, end)]
    actual = Protocol("last", k=k)(network, tokens, length)
    torch.testing.assert_close(actual[0], torch.tensor(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("protocol", [Protocol("full"), Protocol("windowed", window=3), Protocol("sliding", stride=3)])
@pytest.mark.parametrize("length", [4, 7, 16, 31, 32])
def test_every_target_is_scored_exactly_once_at_every_length(protocol: Protocol, length: int) -> None:
    assert protocol(Counter(), torch.arange(33)[None], length)[0].tolist() == list(range(1, 33))
    assert protocol.scored(length, 32).tolist() == list(range(32))


@pytest.mark.parametrize("skip", [1, 15, 16, 31])
@pytest.mark.parametrize("length", [4, 8, 16, 32])
def test_sliding_scores_the_same_targets_at_every_length_behind_skip(length: int, skip: int) -> None:
    protocol = Protocol("sliding", stride=4, skip=skip)
    assert protocol(Counter(), torch.arange(33)[None], length)[0].tolist() == list(range(skip + 1, 33))
    assert protocol.scored(length, 32).tolist() == list(range(skip, 32))


def test_sliding_behind_skip_always_has_its_context() -> None:
    counter = Counter()
    sliding(counter, torch.arange(65)[None], 16, stride=4, skip=16)
    assert sum(rows for rows, _ in counter.forwards) == (64 - 16) // 4  # no step is spent on what is not scored
    assert {length for _, length in counter.forwards} == {16}


def test_last_counts_its_targets() -> None:
    protocol = Protocol("last", k=3)
    scored = [5, 6, 7, 13, 14, 15, 21, 22, 23, 29, 30, 31]
    assert protocol(Counter(), torch.arange(33)[None], 8)[0].tolist() == [target + 1 for target in scored]
    assert protocol.scored(8, 32).tolist() == scored
    assert protocol.scored(8, 31).tolist() == scored[:9]  # the last segment is short


@pytest.mark.parametrize("name", positions.names())
def test_a_window_of_the_whole_segment_is_full(name: str) -> None:
    network, tokens = network_of(name, length=16), tokens_of(48)
    expected = full(network, tokens, 16)
    for window in (16, 1000):
        torch.testing.assert_close(windowed(network, tokens, 16, window=window), expected)
    assert not torch.allclose(windowed(network, tokens, 16, window=2), expected)


@pytest.mark.parametrize("skip", [0, 16, 32])
def test_a_stride_of_the_whole_length_is_full(skip: int) -> None:
    network, tokens = network_of(length=16), tokens_of(48)
    expected = full(network, tokens, 16)[:, skip:]
    torch.testing.assert_close(sliding(network, tokens, 16, stride=16, skip=skip), expected)
    protocol = Protocol("sliding", stride=16, skip=skip)
    assert torch.equal(protocol(network, tokens, 16), expected)
    assert protocol.part_of_full(16)
    assert not protocol.part_of_full(32)
    assert not Protocol("sliding", stride=16, skip=skip + 1).part_of_full(16)
    assert not torch.allclose(sliding(network, tokens, 16, stride=4, skip=skip), expected)


@pytest.mark.parametrize("budget", [1, 24, 100])
def test_losses_do_not_depend_on_how_many_segments_run_at_once(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    network, tokens = network_of(), tokens_of(48, blocks=2)
    for protocol in (Protocol("full"), Protocol("windowed", window=3), Protocol("sliding", stride=3)):
        expected = protocol(network, tokens, 8)
        with monkeypatch.context() as patch:
            patch.setattr(protocols, "TOKENS_PER_FORWARD", budget)
            torch.testing.assert_close(protocol(network, tokens, 8), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("length", "budget"), [(4, 16), (8, 16), (16, 16), (32, 16), (8, 20)])
def test_tokens_of_a_forward_are_bounded(length: int, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocols, "TOKENS_PER_FORWARD", budget)
    for protocol in (Protocol("full"), Protocol("sliding", stride=3), Protocol("last", k=2)):
        counter = Counter()
        protocol(counter, torch.arange(65)[None].repeat(3, 1), length)
        assert all(rows * size <= max(budget, length) for rows, size in counter.forwards)
        if protocol.name == "full":  # and used
            assert max(rows for rows, _ in counter.forwards) == max(1, budget // length)


def test_losses_are_fp32_when_the_network_computes_in_bf16() -> None:
    network, tokens = network_of(), tokens_of(48)
    expected = full(network, tokens, 16)
    with torch.autocast("cpu", torch.bfloat16):
        logits = network(tokens[:, :-1].unflatten(1, (-1, 16))[0])
        assert logits.dtype == torch.bfloat16  # or the test would show nothing
        losses = full(network, tokens, 16)
    assert losses.dtype == torch.float32
    # rounded to bf16 these losses would lie on a grid of 2^-7 relative; log-softmax in fp32 leaves them off it
    assert (losses.bfloat16().float() != losses).float().mean() > 0.9
    oracle = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), tokens[0, 1:], reduction="none")
    torch.testing.assert_close(losses[0].double(), oracle, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(losses, expected, rtol=0.1, atol=0.3)
