"""Properties of forward passes: the tokens on which logits may depend, and conditions that must not change logits."""

import inspect
import re

import torch
from torch import Tensor, nn

from kerple.attention import blocks
from kerple.positions.base import Position
from kerple.positions.visibility import Visibility
from kerple.testing.subject import (
    SHORT,
    VOCABULARY,
    DoesNotApply,
    Subject,
    holds,
    holds_at_lengths,
    same,
    set_positions,
    tokens,
)


def cuts(length: int) -> tuple[int, int]:
    """Return two positions at which inputs are cut: inside a block of queries, and near the end."""
    return 2 * length // 3, length - 20


@holds_at_lengths
def the_past_has_no_gradient_from_the_future(subject: Subject, length: int) -> None:
    """According to autograd, the logits before a cut depend only on their own and earlier embeddings."""
    network = subject.network(length)
    embedded: list[Tensor] = []

    def keep(module: nn.Module, arguments: tuple, x: Tensor) -> Tensor:
        embedded.append(x.detach().requires_grad_())
        return embedded[0]

    network.embedding.register_forward_hook(keep)
    logits = network(tokens(2, length))
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    for cut in cuts(length):
        (gradient,) = torch.autograd.grad((logits * weights)[:, :cut].sum(), embedded[0], retain_graph=True)
        largest = gradient.abs().amax(-1)  # (2, T)
        assert (largest[:, cut:] == 0).all(), f"a token has a gradient from a later one, in {length} tokens"
        assert (largest[:, :cut] > 0).all(), f"a token has no gradient from itself or a later one, in {length} tokens"


@holds_at_lengths
@torch.no_grad()
def what_comes_later_changes_nothing(subject: Subject, length: int) -> None:
    """Later tokens change no logit. Autograd cannot show this for positions that depend on tokens."""
    network, ids = subject.network(length), tokens(2, length)
    before = network(ids)
    for cut in cuts(length):
        changed = ids.clone()
        changed[:, cut:] = (ids[:, cut:] + 1) % VOCABULARY
        after = network(changed)
        same(after[:, :cut], before[:, :cut], f"logits before a changed token {cut} of {length}")
        assert (after[:, cut:] - before[:, cut:]).abs().max() > 1e-3, "a changed token changes nothing"


@holds_at_lengths
@torch.no_grad()
def a_sequence_is_read_alike_alone_and_in_a_batch(subject: Subject, length: int) -> None:
    """The logits of each of three sequences are the same without the others."""
    network, ids = subject.network(length), tokens(3, length)
    alone = torch.cat([network(row[None]) for row in ids])
    same(network(ids), alone, f"logits of {length} tokens in a batch")


@holds_at_lengths
@torch.no_grad()
def an_offset_changes_nothing_exactly_where_the_strategy_says_so(subject: Subject, length: int) -> None:
    """Logits of tokens moved by 500 positions are equal if ``shift_invariant`` is True, differ if it is False."""
    network = subject.network(length)
    position = network.positions[0]
    if position.shift_invariant is None:
        raise DoesNotApply("shift_invariant is None")
    offset = 500 if position.max_length is None else min(500, position.max_length - length)
    ids = tokens(2, length)
    if offset < 1:
        return
    moved = float((network(ids, offset=offset) - network(ids)).abs().max())
    result = f"an offset of {offset} moves logits of {length} tokens by {moved:.3g}"
    assert not position.shift_invariant or moved < 1e-4, f"shift_invariant, but {result}"
    assert position.shift_invariant or moved > 1e-3, f"not shift_invariant, but {result} only"


@holds_at_lengths
@torch.no_grad()
def the_logits_of_a_prefix_are_the_prefix_of_the_logits(subject: Subject, length: int) -> None:
    """The logits of a prefix are the first logits of the whole input."""
    network, ids = subject.network(length), tokens(2, length)
    if not network.prefix_consistent:
        raise DoesNotApply("it is not prefix_consistent")
    whole = network(ids)
    for cut in (17, *cuts(length)):
        same(whole[:, :cut], network(ids[:, :cut]), f"logits of the first {cut} of {length} tokens")


@holds_at_lengths
@torch.no_grad()
def a_window_hides_what_is_before_it_and_nothing_else(subject: Subject, length: int) -> None:
    """In two layers with a window of w keys, a change affects only the next 2w - 2 tokens."""
    network, ids = subject.network(length), tokens(1, length)
    window, changed = 3 + length // 20, ids.clone()
    first, last = length // 3, length // 3 + 2 * window - 2  # the first token unchanged, the first that is not affected
    changed[:, :first] = (ids[:, :first] + 1) % VOCABULARY
    if all(p.window is None for p in network.positions):
        same(network(ids, Visibility(length)), network(ids), "logits with a window of all keys")
    before, after = network(ids, Visibility(window)), network(changed, Visibility(window))

    same(before[:, last:], after[:, last:], f"logits out of reach of a changed token, window {window}")
    assert (before[:, first:last] - after[:, first:last]).abs().max() > 1e-4, "a changed token changes nothing"
    # the same tokens at other rows give equal logits only for some strategies and lengths
    if length == SHORT and network.positions[0].shift_invariant and network.prefix_consistent:
        beyond = network(ids[:, first:], Visibility(window), offset=first)
        skip = 2 * window - 2
        same(beyond[:, skip:], before[:, last:], "logits without the tokens that no window reaches", atol=1e-4)


@holds_at_lengths
@torch.no_grad()
def reading_in_pieces_with_a_cache_gives_what_reading_at_once_does(subject: Subject, length: int) -> None:
    """With a cache, pieces of several tokens and single tokens give the logits of one forward pass.

    Tested without a window, and with a window and half the number of key heads.
    """
    for kv_heads, window in ((None, None), (2, length // 4)):
        network, ids = subject.network(length, kv_heads), tokens(2, length)
        if not network.prefix_consistent:
            raise DoesNotApply("it is not prefix_consistent")
        visibility = Visibility(window)
        cache = network.new_cache(visibility)
        sizes = [length // 2, *[1] * 6, 4, length - length // 2 - 12, 1, 1]
        pieces = [network(piece, visibility, cache=cache) for piece in ids.split(sizes, 1)]
        same(torch.cat(pieces, 1), network(ids, Visibility(window)), f"logits from a cache, {length} tokens")
        for layer in cache.layers:
            size = 0 if layer.keys is None else layer.keys.shape[2]
            assert size <= (window or length), f"a cache for a window of {window} keys keeps {size}"


@holds_at_lengths
@torch.no_grad()
def the_size_of_a_block_changes_nothing(subject: Subject, length: int) -> None:
    """Attention in blocks of the default size and of two other sizes gives the same logits."""
    network, ids, usual = subject.network(length), tokens(2, length), blocks.QUERIES_AT_ONCE
    for window in (None, length // 4):
        expected = network(ids, Visibility(window))
        try:
            for blocks.QUERIES_AT_ONCE in (max(3, length // 7), length):
                got = network(ids, Visibility(window))
                same(got, expected, f"logits in blocks of {blocks.QUERIES_AT_ONCE}, window {window}, {length} tokens")
        finally:
            blocks.QUERIES_AT_ONCE = usual


@holds_at_lengths
@torch.no_grad()
def positions_read_pair_by_pair_are_those_read_in_line(subject: Subject, length: int) -> None:
    """Positions 0, 1, 2, … that are marked as not contiguous, so that no table is used, give the same logits."""
    ids, network = tokens(2, length), subject.network(length)
    windows = (None, length // 4)
    in_line = [network(ids, Visibility(window)) for window in windows]
    set_positions(network, torch.arange(length))
    for window, expected in zip(windows, in_line, strict=True):
        same(network(ids, Visibility(window)), expected, f"logits of {length} tokens with positions said to have gaps")


@holds_at_lengths
@torch.no_grad()
def sequences_may_have_positions_of_their_own(subject: Subject, length: int) -> None:
    """Each sequence of a batch may have its own positions."""
    network, ids, line = subject.network(2 * length), tokens(3, length), torch.arange(length)
    where = torch.stack([line, 3 + line, 2 * line])  # (3, T)
    together = set_positions(network, where)(ids)
    alone = [set_positions(subject.network(2 * length), row)(ids[i : i + 1]) for i, row in enumerate(where)]
    same(together, torch.cat(alone), f"logits of {length} tokens with separate positions")


@holds_at_lengths
@torch.no_grad()
def grouped_heads_are_heads_that_share_keys(subject: Subject, length: int) -> None:
    """Two key heads for four query heads equal four key heads with repeated weights."""
    grouped, full, ids = subject.network(length, kv_heads=2), subject.network(length), tokens(2, length)
    weights = grouped.state_dict()
    for name in [name for name in weights if ".qkv." in name]:
        q, *kv = weights[name].split([32, 16, 16])
        weights[name] = torch.cat([q, *(x.unflatten(0, (2, 8)).repeat_interleave(2, 0).flatten(0, 1) for x in kv)])
    full.load_state_dict(weights)
    for window in (None, length // 4):
        same(grouped(ids, Visibility(window)), full(ids, Visibility(window)), "logits with 2 key heads for 4 heads")


@holds
@torch.no_grad()
def a_compiled_network_computes_the_same(subject: Subject, backend: str = "eager") -> None:
    """``network.compile`` changes no logit by more than 1e-4, for 150 tokens (two blocks of queries)."""
    network, ids = subject.network(150), tokens(2, 150)
    expected = network(ids)
    torch.compiler.reset()
    network.compile(backend=backend)
    same(network(ids), expected, f"logits compiled by {backend}", atol=1e-4)


@holds
def the_docstring_counts_the_parameters(subject: Subject) -> None:
    """The formula in the line ``Parameters: `…` `` equals the number of parameters."""
    position = subject.position()
    docstring = type(position).__doc__ or ""  # not the docstring of a base class
    formula = re.search(r"Parameters: `([^`]+)`", docstring)
    name = type(position).__name__
    assert formula, f"the docstring of {name} has no line 'Parameters: `formula`' in D, H, δ, L and the options"
    options = {k: p.default for k, p in inspect.signature(type(position)).parameters.items()}
    options |= getattr(subject.build, "keywords", {})
    expected = eval(formula[1], {"__builtins__": {}}, options | {"D": 32, "H": 4, "δ": 8, "L": 32})  # the author's own
    inner = [m for m in position.modules() if isinstance(m, Position) and m is not position]
    theirs = {p for strategy in inner for p in strategy.parameters()}  # counted in their own docstrings
    count = sum(p.numel() for p in position.parameters())
    ours = count - sum(p.numel() for p in theirs)
    assert expected in (count, ours), f"{count} parameters, the docstring says {formula[1]} = {expected}"
