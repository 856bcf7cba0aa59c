"""Tests of forward passes: the tokens on which logits may depend, and conditions that must not change logits."""

import inspect
import re
from typing import Any

import torch
from torch import Tensor, nn

from kerple.attention.query_block_attention import attend_blocks
from kerple.model.self_attention import SelfAttention
from kerple.positions.base import Position, joint_shift_invariance
from kerple.positions.token_positions import TokenPositions
from kerple.positions.visibility import Visibility
from kerple.testing.subject import (
    SHORT,
    VOCABULARY,
    DoesNotApply,
    Subject,
    holds,
    holds_at_lengths,
    results_of_hooks,
    same,
    set_positions,
    tokens,
)


def cuts(length: int) -> tuple[int, int]:
    """Return two indices of tokens at which an input is cut: two thirds of the length, and 20 tokens before the end."""
    return 2 * length // 3, length - 20


@holds_at_lengths
def no_gradient_from_later_logits(subject: Subject, length: int) -> None:
    """The gradient of a logit is zero for later embeddings, and nonzero for earlier ones."""
    network = subject.network(length)
    embedded: list[Tensor] = []

    def make_leaf(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[0]

    network.embedding.register_forward_hook(make_leaf)
    logits = network(tokens(2, length))
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    for cut in cuts(length):
        (gradient,) = torch.autograd.grad((logits * weights)[:, :cut].sum(), embedded, retain_graph=True)
        largest = gradient.abs().amax(-1)  # (2, T)
        given = f"the logits before token {cut} of {length} have"
        assert (largest[:, cut:] == 0).all(), f"{given} a gradient for a later embedding"
        assert (largest[:, :cut] > 0).all(), f"{given} no gradient for an earlier embedding"


@holds_at_lengths
@torch.no_grad()
def no_dependence_on_later_tokens(subject: Subject, length: int) -> None:
    """Logits do not depend on later tokens.

    A strategy may compute positions from token ids. Logits that depend on later ids in this way have no gradient for
    later embeddings, so that the test of gradients does not detect the dependence.
    """
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
def no_dependence_on_other_sequences(subject: Subject, length: int) -> None:
    """Logits do not depend on the other sequences in the batch."""
    network, ids = subject.network(length), tokens(3, length)
    same(network(ids), torch.cat([network(row[None]) for row in ids]), f"logits of {length} tokens in a batch")


@holds_at_lengths
@torch.no_grad()
def documents_alone(subject: Subject, length: int) -> None:
    """Each document of a sequence has the logits that it has alone.

    Two documents are read in one sequence, without a window and with one.
    """
    network, ids = subject.network(length), tokens(2, length)
    begin = length // 3  # the first token of the second document
    documents = (torch.arange(length) >= begin).long().expand(2, -1)
    for window in (None, length // 4):
        visibility = Visibility(window)
        alone = torch.cat([network(ids[:, :begin], visibility), network(ids[:, begin:], visibility)], 1)
        what = f"logits of documents of {begin} and {length - begin} tokens"
        same(network(ids, visibility, documents=documents), alone, what, atol=1e-4)


@holds_at_lengths
@torch.no_grad()
def shift_invariance(subject: Subject, length: int) -> None:
    """A shift of all positions changes the logits if and only if shift_invariant is False.

    The shift is 499 positions, or fewer if the strategy has a ``max_length``.
    """
    network = subject.network(length)
    if network.max_length == length:  # the training length, so a longer one has positions for the shift
        network = subject.network(length + 499)
    invariant = joint_shift_invariance(network.positions)
    if invariant is None:
        raise DoesNotApply("shift_invariant is None")
    # a prime, because places without a task repeat after rows - 1 positions (`Abacus`)
    offset = 499 if network.max_length is None else min(499, network.max_length - length)
    ids = tokens(2, length)
    change = float((network(ids, offset=offset) - network(ids)).abs().max())
    result = f"an offset of {offset} changes logits of {length} tokens by {change:.3g}"
    assert not invariant or change < 1e-4, f"shift_invariant is True, but {result}"
    assert invariant or change > 1e-3, f"shift_invariant is False, but {result} only"


@holds_at_lengths
@torch.no_grad()
def prefix_consistency(subject: Subject, length: int) -> None:
    """The logits of a prefix are the first logits of the whole input."""
    network, ids = subject.network(length), tokens(2, length)
    if not network.prefix_consistent:
        raise DoesNotApply("it is not prefix_consistent")
    whole = network(ids)
    for cut in (17, *cuts(length)):
        same(whole[:, :cut], network(ids[:, :cut]), f"logits of the first {cut} of {length} tokens")


@holds_at_lengths
@torch.no_grad()
def reach_of_a_window(subject: Subject, length: int) -> None:
    """With a window, logits depend only on the tokens that the windows of all layers reach.

    In n layers with a window of w keys, a token affects itself and the next n · (w - 1) tokens.
    """
    network, ids = subject.network(length), tokens(1, length)
    window = 3 + length // 20
    changed = ids.clone()
    reach = len(network.blocks) * (window - 1)
    first = length // 3  # the first unchanged token
    last = first + reach  # the first token that no change reaches
    changed[:, :first] = (ids[:, :first] + 1) % VOCABULARY
    if all(p.window is None for p in network.positions):
        same(network(ids, Visibility(length)), network(ids), "logits with a window of all keys")
    before, after = network(ids, Visibility(window)), network(changed, Visibility(window))

    same(before[:, last:], after[:, last:], f"logits out of reach of a changed token, window {window}")
    assert (before[:, first:last] - after[:, first:last]).abs().max() > 1e-4, "a changed token changes nothing"
    # Without the first tokens, the later tokens keep their positions, but have smaller rows (indices in the input).
    # Even a shift-invariant strategy may depend on large rows, so only the shortest input is compared. For example,
    # `XPos` clamps the factors of rows above 63 * decay.
    if length == SHORT and joint_shift_invariance(network.positions) and network.prefix_consistent:
        rest = network(ids[:, first:], Visibility(window), offset=first)
        same(rest[:, reach:], before[:, last:], "logits without the tokens that no window reaches", atol=1e-4)


@holds_at_lengths
@torch.no_grad()
def decoding_with_a_cache(subject: Subject, length: int) -> None:
    """Reading in pieces with a cache gives the logits of one forward pass.

    Pieces have one or several tokens. The test is made without a window, and with a window and half as many key heads
    as query heads.
    """
    for kv_heads, window in ((None, None), (2, length // 4)):
        network, ids = subject.network(length, kv_heads), tokens(2, length)
        if not network.prefix_consistent:
            raise DoesNotApply("it is not prefix_consistent")
        visibility = Visibility(window)
        cache, sizes = network.new_cache(visibility), [length // 2, *[1] * 6, 4, length - length // 2 - 12, 1, 1]
        pieces = [network(piece, visibility, cache=cache) for piece in ids.split(sizes, 1)]
        same(torch.cat(pieces, 1), network(ids, visibility), f"logits from a cache, {length} tokens")
        for layer in cache.layers:
            size = 0 if layer.keys is None else layer.keys.shape[2]
            assert size <= (window or length), f"a cache for a window of {window} keys keeps {size}"


@holds_at_lengths
@torch.no_grad()
def block_size(subject: Subject, length: int) -> None:
    """Logits do not depend on the block size of attention.

    Attention is computed in blocks of queries. In each layer, its output for the default size is compared with that for
    two other sizes.
    """
    network = subject.network(length)

    def compare(attention: SelfAttention, arguments: tuple[Any, ...]) -> None:
        q, k, v, spec = attention.prepare(*arguments[:3])
        expected = attend_blocks(q, k, v, spec)
        for size in (max(3, length // 7), length):
            got = attend_blocks(q, k, v, spec, size)
            what = f"attention in blocks of {size}, window {spec.window}, {length} tokens"
            same(got, expected, what, atol=1e-4)  # these values are ten times as large as logits

    for block in network.blocks:
        block.attention.register_forward_pre_hook(compare)
    for window in (None, length // 4):
        network(tokens(2, length), Visibility(window))


@holds_at_lengths
@torch.no_grad()
def distances_of_pairs(subject: Subject, length: int) -> None:
    """Distances computed per pair of tokens give the same logits as a table of distances.

    Positions 0, 1, 2, … are marked as not contiguous, so that no table is used.
    """
    ids, network = tokens(2, length), subject.network(length)
    windows = (None, length // 4)
    from_table = [network(ids, Visibility(window)) for window in windows]
    set_positions(network, torch.arange(length))
    for window, expected in zip(windows, from_table, strict=True):
        what = f"logits of {length} tokens with positions marked as not contiguous"
        same(network(ids, Visibility(window)), expected, what)


@holds_at_lengths
@torch.no_grad()
def positions_of_each_sequence(subject: Subject, length: int) -> None:
    """Sequences with different positions have the same logits in a batch and alone."""
    network, ids, rows = subject.network(2 * length), tokens(3, length), torch.arange(length)
    positions = torch.stack([rows, 3 + rows, 2 * rows])  # (3, T)
    batch = set_positions(network, positions)(ids)
    single = [set_positions(subject.network(2 * length), p)(ids[i : i + 1]) for i, p in enumerate(positions)]
    same(batch, torch.cat(single), f"logits of {length} tokens with different positions per sequence")


@holds
@torch.no_grad()
def positions_of_keys(subject: Subject) -> None:
    """Results of hooks that depend on the rows of earlier tokens also depend on their positions.

    A strategy that reads `TokenPositions.rows` instead of ``ids`` ignores offsets, gaps and random positions. Queries
    may depend on rows, because the number of keys that they see does (`SSMax`).
    """
    rows = torch.arange(SHORT)
    near = torch.where((rows >= 8) & (rows < SHORT - 5), 8 + (rows - 8) // 2, rows)  # the same for the last 5, queries
    places = torch.ones(2, SHORT, dtype=torch.int64)
    network = subject.network(SHORT)
    for layer in subject.distinct_layers:
        expected, by_rows, by_ids = (
            results_of_hooks(
                network.positions[layer], SHORT, positions=TokenPositions(*pair, contiguous=False, places=places)
            )
            for pair in ((rows, rows), (near, rows), (rows, near))
        )
        for what in [what for what in expected if what not in ("q", "token_state")]:
            rows_matter, ids_matter = (not torch.equal(r[what], expected[what]) for r in (by_rows, by_ids))
            assert ids_matter or not rows_matter, f"{what} changes by positions.rows; use positions.ids"


@holds_at_lengths
@torch.no_grad()
def grouped_query_attention(subject: Subject, length: int) -> None:
    """Grouped-query attention equals attention with repeated key and value heads.

    A network with two key heads for four query heads is compared with a network with four key heads. In the second
    network, the weights of each key and value head occur twice.
    """
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
def head_dimension(subject: Subject) -> None:
    """Hooks use the head dimension of the shape, which may differ from D / H.

    With the head dimension 16 and 4 heads, results for the widths 32 and 64 are compared. They may differ if the
    strategy reads hidden states, or has parameters whose sizes depend on the width.
    """
    for layer in subject.distinct_layers:
        narrow, wide = (subject.position(2 * SHORT, layer, dim, 16) for dim in (32, 64))
        got, expected = (
            results_of_hooks(position, SHORT, dim=dim, head_dim=16) for position, dim in ((narrow, 32), (wide, 64))
        )
        sizes = [[parameter.shape for parameter in position.parameters()] for position in (narrow, wide)]
        if sizes[0] == sizes[1] and "token_state" not in expected:
            for what in [what for what in expected if what != "embed"]:
                same(got[what], expected[what], f"{what} for D = 32, H = 4, δ = 16; use shape.head_dim, not D / H")


@holds
@torch.no_grad()
def torch_compile(subject: Subject, backend: str = "eager") -> None:
    """`torch.compile` does not change the logits.

    The tolerance is 1e-4. The input has 150 tokens, which are two blocks of queries.
    """
    network, ids = subject.network(150), tokens(2, 150)
    expected = network(ids)
    torch.compiler.reset()
    network.compile(backend=backend)
    same(network(ids), expected, f"logits compiled by {backend}", atol=1e-4)


@holds
def number_of_parameters(subject: Subject) -> None:
    """The docstring states the number of parameters.

    The formula in the line ``Parameters: `…` `` may include the parameters of an inner strategy, or leave them out.
    """
    for layer in subject.distinct_layers:
        compare_number_of_parameters(subject, subject.position(layer=layer))


def compare_number_of_parameters(subject: Subject, position: Position) -> None:
    """Compare the number of parameters of a strategy with the formula in its docstring."""
    strategy = type(position)
    formula = re.search(r"Parameters: `([^`]+)`", strategy.__doc__ or "")  # not the docstring of a base class
    missing = "has no line 'Parameters: `formula`'; use D (width), H (heads), δ (D/H), L (training length), options"
    assert formula, f"the docstring of {strategy.__name__} {missing}"
    options = {k: p.default for k, p in inspect.signature(strategy).parameters.items()}
    options |= getattr(subject.build, "keywords", {})
    # `eval` is safe here, because the formula is in a file that was imported
    try:
        expected = eval(formula[1], {"__builtins__": {}}, options | {"D": 32, "H": 4, "δ": 8, "L": 32})
    except Exception as error:
        raise AssertionError(f"the formula {formula[1]} in the docstring is not valid: {error!r}") from error
    inner = nn.ModuleList(m for m in position.modules() if isinstance(m, Position) and m is not position)
    count = sum(p.numel() for p in position.parameters())
    own = count - sum(p.numel() for p in inner.parameters())
    assert expected in (count, own), f"{count} parameters, the docstring says {formula[1]} = {expected}"
