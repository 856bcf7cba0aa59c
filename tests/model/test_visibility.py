"""Windows with first tokens, against loops over pairs of tokens and against forward passes without a cache."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from kerple import positions
from kerple.base.errors import UserError
from kerple.model import Transformer
from kerple.model.architecture import Architecture
from kerple.model.first_token_scores import JOINT_HOOKS
from kerple.model.generation import generate
from kerple.model.self_attention import PositionContext, SelfAttention
from kerple.positions import T5, ALiBi, Combined, KerpleLog, NoPE, PoPE, Position, RoPE, Shape, Sink, SSMax, XPos
from kerple.positions.token_positions import TokenPositions
from kerple.positions.visibility import EVERYTHING, Visibility

LENGTH, WINDOW, FIRST, SHAPE = 23, 5, 3, Shape(12, 2, 8)
KINDS = ("true", "capped", "cache")
BUILD = {
    **{s.__name__: s for s in (KerpleLog, ALiBi, RoPE, NoPE, T5, PoPE, positions.KerpleBiasWeight)},
    "XPos": partial(XPos, decay=8),
    "Combined": partial(Combined, parts=[SSMax, KerpleLog, Sink]),
}


def distance(kind: str, m: int, n: int) -> int:
    """Return the distance of key n from query m, as defined in the two papers."""
    if m - n < WINDOW or kind == "true":
        return m - n
    kept = sorted({*range(FIRST), *range(m - WINDOW + 1, m + 1)})  # rows in the cache of StreamingLLM
    return WINDOW if kind == "capped" else kept.index(m) - kept.index(n)


def score(position: Position, q: Tensor, k: Tensor, m: int, n: int, d: int) -> Tensor:
    """Return the scaled score (B, H) of query m and key n at distance d, given all queries and keys (B, H, T, δ)."""

    def token(row: int, place: int) -> TokenPositions:
        rows, ids = torch.tensor([row]), torch.tensor([place])
        return TokenPositions(rows, ids, contiguous=False, visibility=Visibility(WINDOW, FIRST))

    q, k = q[:, :, m : m + 1], k[:, :, n : n + 1]
    q, k = position.transform_qk(q, k, None, token(m, d))[0], position.transform_qk(q, k, None, token(n, 0))[1]
    s, distances = (q * k).sum((-2, -1)) * SHAPE.head_dim**-0.5, torch.tensor([float(d)])
    weight, bias = position.score_scale(distances), position.bias(distances)
    s = s if weight is None else s * weight[:, 0]
    return s if bias is None else s + bias[:, 0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BUILD)
def test_attention_is_a_loop_over_the_keys_that_a_query_sees(name: str, kind: str) -> None:
    position, attention = BUILD[name](SHAPE).double(), SelfAttention(SHAPE, Architecture(bias=False)).double()
    torch.nn.init.normal_(attention.qkv.weight, std=0.4)
    attention.out = torch.nn.Identity()
    x = torch.randn(2, LENGTH, SHAPE.dim, dtype=torch.float64, requires_grad=True)
    q, k, v = attention.split(attention.qkv(x))
    rows = []
    for m in range(LENGTH):
        seen = [n for n in range(m + 1) if n < FIRST or m - n < WINDOW]
        scores = [score(position, q, k, m, n, distance(kind, m, n)) for n in seen]
        if position.uses("sink_logit"):
            scores.append(position.sink_logit(q[:, :, m : m + 1], TokenPositions.arange(1)).expand(2, 2, 1)[..., 0])
        p = torch.stack(scores, -1).softmax(-1)[..., : len(seen)]  # (B, H, keys)
        rows.append((p[..., None] * v[:, :, seen]).sum(2))
    expected = torch.stack(rows, 1).flatten(2)  # (B, T, D)
    leaves, grad = [x, attention.qkv.weight, *position.parameters()], torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, leaves, grad, materialize_grads=True)
    for option in ("auto", "reference"):
        tokens, visibility = torch.zeros(2, LENGTH, dtype=torch.int64), Visibility(WINDOW, FIRST, kind)
        context = PositionContext(position, TokenPositions.arange(LENGTH, 40), tokens, visibility, option)
        out = attention(x, position, context)
        torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(torch.autograd.grad(out, leaves, grad, materialize_grads=True), gradients)


@pytest.mark.parametrize(
    ("name", "kind"), [*product([*BUILD, "LayerPattern"], KINDS), ("FoX", "true"), ("PaTH", "true"), ("DAPEv2", "true")]
)
@torch.no_grad()
def test_generation_is_equal_without_a_cache_and_the_cache_does_not_grow(name: str, kind: str) -> None:
    layers = {"LayerPattern": partial(positions.LayerPattern, windows={"local": 3})}
    build = (positions.strategies() | BUILD | layers)[name]
    network = Transformer(Shape(16, 2, 64), 2, 30, build, kv_heads=1, init=0.16).double().eval()
    visibility, tokens = Visibility(WINDOW, FIRST, kind), torch.randint(30, (2, 40))
    expected, cache, got, sizes = network(tokens, visibility), network.new_cache(visibility), [], []
    for piece in tokens.split([2, 6, 12, *[1] * 20], 1):  # the first tokens come in two calls
        got.append(network(piece, visibility, cache=cache))
        parts = [part for layer in cache.layers for part in (layer, layer.first_tokens) if part]
        sizes.append(sum(x.untyped_storage().nbytes() for part in parts for x in (part.keys, part.values)))
    torch.testing.assert_close(torch.cat(got, 1), expected, atol=1e-10, rtol=1e-10)
    all_tokens = any(map(network.positions[0].uses, JOINT_HOOKS))  # such scores may need all tokens
    assert len(set(sizes[4:])) == 1 or all_tokens
    assert not torch.allclose(expected, network(tokens, Visibility(WINDOW)), atol=1e-3)
    torch.testing.assert_close(network(tokens, Visibility(WINDOW, 40 - WINDOW)), network(tokens))  # all tokens
    text = tokens[:, :12]
    for new in generate(network, text, 8, visibility=visibility):
        assert torch.equal(new, network(text, visibility)[:, -1].argmax(-1))
        text = torch.cat([text, new[:, None]], 1)


@pytest.mark.parametrize("name", ["CoPE", "FoX", "PaTH", "Sinusoidal", "RandomizedPositions", "DAPE"])
def test_strategies_that_need_true_distances_are_refused(name: str) -> None:
    network, tokens = Transformer(Shape(16, 2, 8), 1, 30, positions.strategies()[name]), torch.randint(30, (1, 12))
    assert network.losses(tokens, visibility=Visibility(4, 2)).isfinite().all()
    for kind in ("capped", "cache"):
        with pytest.raises(UserError, match=f"distances: got {kind}, expected true for {name}"):
            network.losses(tokens, visibility=Visibility(4, 2, kind))


def test_a_cache_has_one_visibility_and_distances_need_first_tokens() -> None:
    network, tokens = Transformer(Shape(16, 2, 8), 1, 30, RoPE), torch.randint(30, (1, 12))
    with pytest.raises(UserError, match=r"visibility: got .*window=3.*create another"):
        network(tokens, Visibility(3), cache=network.new_cache())
    with pytest.raises(UserError, match="distances: got capped with window 3 and first_keys 0, expected true"):
        Visibility(3, distances="capped")
    assert EVERYTHING.narrow(4) == Visibility(8, 2).narrow(4) == Visibility(4)
    assert Visibility(4).with_bos().narrow(4) == Visibility(4)  # as trained, so without BOS outside the layer's window
    assert Visibility(3, 2).narrow(4) == Visibility(3, 2)
