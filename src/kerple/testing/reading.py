"""Properties of equal results, for any size of blocks, with gaps, by sequence, with grouped heads, compiled."""

import inspect
import re
from functools import partial

import torch

from kerple.attention import blocks
from kerple.base.errors import UserError
from kerple.positions.base import HOOKS, Position
from kerple.positions.wrapper import Wrapper
from kerple.testing.subject import DoesNotApply, Subject, holds, move, same, tokens


@holds
@torch.no_grad()
def the_size_of_a_block_changes_nothing(subject: Subject) -> None:
    """Attention in blocks of 8 and 3 queries is the same as at once, with and without a window."""
    network, given, usual = subject.network(), tokens(2, 30), blocks.QUERIES_AT_ONCE
    for window in (None, 7):
        whole = network(given, window=window)
        try:
            for blocks.QUERIES_AT_ONCE in (8, 3):
                same(
                    network(given, window=window),
                    whole,
                    f"logits in blocks of {blocks.QUERIES_AT_ONCE}, window {window}",
                )
        finally:
            blocks.QUERIES_AT_ONCE = usual


@holds
@torch.no_grad()
def positions_read_pair_by_pair_are_those_read_in_line(subject: Subject) -> None:
    """Positions 0, 1, 2, … announced as having gaps, so that no table of biases serves, give the same logits."""
    given, positions = tokens(2, 30), torch.arange(30)
    network = subject.network()
    line = [network(given), network(given, window=7)]
    pairs = [move(network, positions)(given), network(given, window=7)]
    for got, wanted in zip(pairs, line, strict=True):
        same(got, wanted, "logits with positions said to have gaps")


@holds
@torch.no_grad()
def sequences_may_have_positions_of_their_own(subject: Subject) -> None:
    """Each sequence of a batch may have its own positions, unless ``per_sequence`` is False."""
    network, given = subject.network(), tokens(3, 15)
    where = torch.stack([torch.arange(15), 3 + torch.arange(15), torch.arange(0, 30, 2)])  # (3, 15)
    able = all(p.per_sequence for p in network.positions)
    try:
        together = move(network, where)(given)
    except UserError:
        assert not able, "per_sequence, but positions (B, T) are refused"
        raise DoesNotApply("per_sequence is False, and positions (B, T) are refused") from None
    assert able, "per_sequence is False, but positions (B, T) are not refused"
    apart = [move(subject.network(), own)(row[None]) for own, row in zip(where, given, strict=True)]
    same(together, torch.cat(apart), "logits of sequences with positions of their own")


@holds
@torch.no_grad()
def grouped_heads_are_heads_that_share_keys(subject: Subject) -> None:
    """Two key heads for four heads equal four whose weights repeat those of the two."""
    grouped, full, given = subject.network(kv_heads=2), subject.network(), tokens(2, 30)
    weights = grouped.state_dict()
    for name in [name for name in weights if ".qkv." in name]:
        q, *kv = weights[name].split([32, 16, 16])
        weights[name] = torch.cat([q, *(x.unflatten(0, (2, 8)).repeat_interleave(2, 0).flatten(0, 1) for x in kv)])
    full.load_state_dict(weights)
    for window in (None, 7):
        same(grouped(given, window=window), full(given, window=window), "logits with 2 key heads for 4 heads")


@holds
@torch.no_grad()
def a_compiled_network_computes_the_same(subject: Subject, backend: str = "eager") -> None:
    """``network.compile`` changes no logit by more than 1e-4."""
    network, given = subject.network(layers=1), tokens(2, 20)
    expected = network(given)
    torch.compiler.reset()
    network.compile(backend=backend)
    same(network(given), expected, f"logits compiled by {backend}", atol=1e-4)


@holds
def a_wrapper_forwards_every_hook(subject: Subject) -> None:
    """A wrapper that does not override a hook hands all of its arguments on."""
    position = subject.position()
    if not isinstance(position, Wrapper):
        raise DoesNotApply("it is no Wrapper")
    inner, asked = position.position, []
    public = {n for n, f in vars(Position).items() if inspect.isfunction(f) and not n.startswith("_")}
    assert public - {"uses"} == set(HOOKS), f"hooks that are not marked: {public - {'uses'} - set(HOOKS)}"
    for hook in HOOKS:
        if getattr(type(position), hook) is not getattr(Wrapper, hook):
            continue  # the wrapper overrides it
        count = len(inspect.signature(getattr(Position, hook)).parameters) - 1
        setattr(inner, hook, partial(lambda hook, *given: asked.append((hook, len(given))), hook))
        getattr(position, hook)(*[None] * count)
        assert asked[-1:] == [(hook, count)], f"{hook} is not forwarded"
        delattr(inner, hook)


@holds
def the_docstring_counts_the_parameters(subject: Subject) -> None:
    """The formula in the line ``Parameters: `…` `` gives the number of learned numbers."""
    position = subject.position()
    docstring = type(position).__doc__ or ""  # not that of a class it is derived from
    formula = re.search(r"Parameters: `([^`]+)`", docstring)
    name = type(position).__name__
    assert formula, f"the docstring of {name} has no line 'Parameters: `formula`' in D, H, δ, L and the options"
    settings = getattr(subject.build, "keywords", {})
    defaults = {k: p.default for k, p in inspect.signature(type(position)).parameters.items()}
    known = defaults | settings | {"D": 32, "H": 4, "δ": 8, "L": 32}
    try:
        expected = eval(formula[1], {"__builtins__": {}}, known)  # the author's own docstring
    except Exception as error:
        raise AssertionError(
            f"the docstring says '{formula[0]}', expected a Python expression in D, H, δ, L and the options, such as "
            f"2 * H ({error})"
        ) from error
    parts = [m for m in position.modules() if isinstance(m, Position) and m is not position]
    others = {p for part in parts for p in part.parameters()}  # strategies inside have docstrings of their own
    count = sum(p.numel() for p in position.parameters())
    own = count - sum(p.numel() for p in others)
    assert expected in (count, own), f"{count} parameters, the docstring says {formula[1]} = {expected}"
