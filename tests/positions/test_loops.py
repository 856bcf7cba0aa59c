"""Output and gradients of attention with each strategy against loops over the paper's formula of a score."""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from pytorch_lightning import Trainer
from torch import Tensor
from torch.library import opcheck
from torch.nn import functional as F

from kerple import positions
from kerple.attention import blocks
from kerple.base.errors import UserError
from kerple.model import Transformer
from kerple.model.architecture import Architecture
from kerple.model.self_attention import SelfAttention, prepare_context
from kerple.positions import (
    Combined,
    OutputGate,
    Position,
    QueryKeyBlock,
    ReRoPE,
    SelfExtend,
    Shape,
    Sink,
    TokenPositions,
)
from kerple.positions.visibility import Visibility
from kerple.training.language_model import LanguageModel

HEADS, HEAD_DIM, LENGTH = 2, 6, 14
SHAPE = Shape(HEADS * HEAD_DIM, HEADS, 8)
Score = Callable[[Tensor, Tensor, Tensor, int, int, int, int], Tensor]
"""(q, k, x, b, h, m, n) to the score of query m and key n, differentiable."""


def softmax(scores: Tensor, head: int) -> Tensor:
    return scores.softmax(0)


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that compares a strategy in fp64, in small blocks, with loops over a score."""
    monkeypatch.setattr(blocks, "QUERIES_AT_ONCE", 5)
    monkeypatch.setattr(blocks, "LARGEST_STORED", 0)  # hooks are called again in the backward pass
    return ours_and_loops


def ours_and_loops(
    position: Position,
    score: Score,
    window: int | None = None,
    offset: int = 0,
    probabilities: Callable = softmax,
    value_bias: Callable = lambda m, n: 0.0,
    gate: Callable = lambda x, h: 1.0,
) -> None:
    """Compare attention of `window` keys, at positions from `offset` on, with loops over queries and keys.

    `probabilities` is a function of the scores of the keys that a query sees, (n,), and of the head. `value_bias` is
    added to the value of a key. `gate` multiplies the output of a token.
    """
    torch.manual_seed(0)
    attention = SelfAttention(SHAPE, Architecture(bias=False)).double()
    torch.nn.init.normal_(attention.qkv.weight, std=0.4)
    attention.out = torch.nn.Identity()
    x = torch.randn(2, LENGTH, SHAPE.dim, dtype=torch.float64, requires_grad=True)
    q, k, v = attention.split(attention.qkv(x))
    rows = []
    for b in range(2):
        for h in range(HEADS):
            for m in range(LENGTH):
                first = 0 if window is None else max(0, m - window + 1)
                s = torch.stack([score(q, k, x, b, h, m, n) for n in range(first, m + 1)])
                values = torch.stack([v[b, h, n] + value_bias(m, n) for n in range(first, m + 1)])
                rows.append(probabilities(s, h) @ values * gate(x[b, m], h))
    expected = torch.stack(rows).view(2, HEADS, LENGTH, HEAD_DIM).transpose(1, 2).flatten(2)
    leaves, grad = [x, attention.qkv.weight, *position.parameters()], torch.randn_like(expected)
    expected_gradients = torch.autograd.grad(expected, leaves, grad, materialize_grads=True)
    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    for option in ("auto", "blocks"):
        context = prepare_context(position, TokenPositions.arange(LENGTH, offset), tokens, Visibility(window), option)
        out = attention(x, position, context)
        torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
        gradients = torch.autograd.grad(out, leaves, grad, materialize_grads=True)
        torch.testing.assert_close(gradients, expected_gradients, atol=1e-11, rtol=1e-11)


def plain_score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
    return q[b, h, m] @ k[b, h, n] / HEAD_DIM**0.5


def of_three(position: Combined, h: int, m: int, n: int, visible: int) -> tuple[Any, Any]:
    scale, kerple, _ = position.parts
    return scale.scale[h] * math.log(visible), -kerple.r1[h] * (1 + kerple.r2[h] * (m - n)).log()


# a strategy, and the factor and the bias of a score
ROWS_AND_SINKS: dict[str, tuple[Callable[[Shape], Position], Callable[..., tuple[Any, Any]]]] = {
    "SSMax": (positions.SSMax, lambda position, h, m, n, visible: (position.scale[h] * math.log(visible), 0)),
    "SSMax, bias": (
        partial(positions.SSMax, start=0.0, bias=1.0),
        lambda position, h, m, n, visible: (position.scale[h] * math.log(visible) + position.offset[h], 0),
    ),
    "llama4": (positions.Temperature, lambda *args: (1 + 0.1 * math.log(1 + args[-1] // SHAPE.length), 0)),
    "inkling": (
        partial(positions.Temperature, rule="inkling", length=3),
        lambda *args: (1 + 0.1 * math.log(max(args[-1] / 3, 1)), 0),
    ),
    "swan": (partial(positions.Temperature, rule="swan"), lambda *args: (math.log(7 + args[-1], SHAPE.length), 0)),
    "Sink": (Sink, lambda *_: (1, 0)),
    "off by one": (lambda shape: Sink(shape, learnable=False), lambda *_: (1, 0)),
    "Combined": (lambda shape: Combined(shape, (positions.SSMax, positions.KerpleLog, Sink)), of_three),
}


@pytest.mark.parametrize(("window", "offset"), [(None, 0), (7, 1000)])
@pytest.mark.parametrize("name", ROWS_AND_SINKS)
def test_rows_and_sinks(name: str, window: int | None, offset: int, loops: Callable) -> None:
    build, change = ROWS_AND_SINKS[name]
    position = build(SHAPE).double().eval()  # swan is 1 in training
    for parameter in position.parameters():
        torch.nn.init.uniform_(parameter, 0.2, 1.5)
    sinks = [part.logits for part in position.modules() if isinstance(part, Sink)]

    def score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
        factor, summand = change(position, h, m, n, m + 1 if window is None else min(window, m + 1))
        return plain_score(q, k, x, b, h, m, n) * factor + summand

    def softmax_with_sink(scores: Tensor, h: int) -> Tensor:
        return scores.exp() / (scores.exp().sum() + sinks[0][h].exp())

    loops(position, score, window, offset, softmax_with_sink if sinks else softmax)


@pytest.mark.parametrize(("window", "offset"), [(None, 0), (9, 1001), (4, 0)])
@pytest.mark.parametrize("group", [1, 3, None])
def test_scores_of_far_keys_use_grouped_distances(
    group: int | None, window: int | None, offset: int, loops: Callable
) -> None:
    """With a bias and a sink, which scores of near and far keys share."""
    near = 5
    extended = (
        partial(SelfExtend, neighbor_window=near, group=group) if group else partial(ReRoPE, neighbor_window=near)
    )
    position = Combined(SHAPE, (positions.KerpleLog, extended, Sink)).double()
    kerple, _, sink = position.parts
    torch.nn.init.uniform_(sink.logits, 0.2, 1.5)
    frequencies = 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)

    def score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
        at = m - n
        if at >= near:
            at = near if group is None else (m + offset) // group - (n + offset) // group + near - near // group
        query, key = (torch.complex(*row.chunk(2)) for row in (q[b, h, m], k[b, h, n]))
        rotated = (query * key.conj() * torch.polar(torch.ones_like(frequencies), at * frequencies)).real.sum()
        return rotated / HEAD_DIM**0.5 - kerple.r1[h] * (1 + kerple.r2[h] * (m - n)).log()

    loops(position, score, window, offset, lambda s, h: s.exp() / (s.exp().sum() + sink.logits[h].exp()))


def test_far_keys_need_no_explicit_scores_and_no_training() -> None:
    network = Transformer(Shape(16, 2, 8), 1, 9, SelfExtend, attention="fused")
    assert network(torch.zeros(1, 40, dtype=torch.int64)).isfinite().all()  # raises without a fused kernel
    wide = partial(SelfExtend, position=positions.PoPE)
    assert Transformer(Shape(16, 2, 8), 1, 9, wide)(torch.zeros(1, 40, dtype=torch.int64)).isfinite().all()
    model = LanguageModel(lambda shape: Combined(shape, (SelfExtend, Sink)), 9, 8, layers=1, dim=16, heads=2)
    with pytest.raises(UserError, match=r"^model\.position: got Combined, which only tests weights"):
        Trainer(logger=False, fast_dev_run=True, accelerator="cpu").fit(model, [{"tokens": torch.zeros(1, 9).long()}])


@pytest.mark.parametrize("elementwise", [False, True])
def test_an_output_gate_multiplies_the_output_of_attention(elementwise: bool, loops: Callable) -> None:
    position = Combined(SHAPE, (positions.ALiBi, partial(OutputGate, elementwise=elementwise))).double()
    slopes, weight = position.parts[0].bias(torch.ones(1)), torch.nn.init.normal_(position.parts[1].gate_weight)
    of_heads = weight.unflatten(0, (HEADS, -1))  # (H, δ or 1, D)

    def score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
        return plain_score(q, k, x, b, h, m, n) + slopes[h, 0].double() * (m - n)

    loops(position, score, gate=lambda x, h: 1 / (1 + (-(of_heads[h] @ x)).exp()))
    network = Transformer(SHAPE, 1, 9, lambda shape: Combined(shape, (positions.ALiBi, OutputGate)), attention="fused")
    network.losses(torch.zeros(1, 40, dtype=torch.int64)).mean().backward()  # raises without a fused kernel


@pytest.mark.parametrize("rest", [False, True])
@pytest.mark.parametrize("window", [None, 7])
def test_stick_breaking(window: int | None, rest: bool, loops: Callable) -> None:
    def broken(scores: Tensor, h: int) -> Tensor:
        left, weights = torch.ones((), dtype=torch.float64), []
        for score in scores[:-1].flip(0):  # the nearest key first; a query does not see itself
            weights.append(left * score.sigmoid())
            left = left * (1 - score.sigmoid())
        return torch.stack([*weights[::-1], left if rest else torch.zeros_like(left)])

    loops(positions.StickBreaking(SHAPE, rest), plain_score, window, probabilities=broken)


def test_stick_breaking_is_precise_with_many_keys() -> None:
    """The remainder after 3,000 keys is e^-2,000, which must not affect near keys in fp32."""
    at, scores = TokenPositions.arange(3000), torch.randn(1, 1, 5, 3000)
    block = QueryKeyBlock(at[-5:], at, torch.ones(5, 3000, dtype=torch.bool).tril(2995))
    position = positions.StickBreaking(Shape(8, 1, 16))
    fp32, fp64 = (position.modify_scores(s, s, s, block).p for s in (scores, scores.double()))
    torch.testing.assert_close(fp32.double(), fp64, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("other", [positions.FoX, Sink])
def test_invalid_combinations_with_stick_breaking_are_refused(other: type[Position]) -> None:
    network = Transformer(SHAPE, 1, 9, partial(Combined, parts=(positions.StickBreaking, other)))
    with pytest.raises(UserError, match=r"returns weights"):
        network(torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.parametrize(("window", "offset"), [(None, 0), (None, 700), (5, 3)])
def test_pope_is_a_sum_of_cosines(window: int | None, offset: int, loops: Callable) -> None:
    position = positions.PoPE(SHAPE, base=500.0, phase=None).double()
    assert -2 * math.pi <= position.phase.min() <= position.phase.max() <= 0
    frequencies = torch.tensor([500.0 ** (-c / HEAD_DIM) for c in range(HEAD_DIM)], dtype=torch.float64)

    def score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
        angles = (m - n) * frequencies + position.phase.view(HEADS, HEAD_DIM)[h]
        return (F.softplus(q[b, h, m]) * F.softplus(k[b, h, n]) * angles.cos()).sum() / HEAD_DIM**0.5

    loops(position, score, window, offset)


@pytest.mark.parametrize(("window", "offset"), [(None, 0), (5, 700)])
def test_xpos(window: int | None, offset: int, loops: Callable) -> None:
    def score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for i in range(HEAD_DIM // 2):
            (q0, q1), (k0, k1) = q[b, h, m, 2 * i : 2 * i + 2], k[b, h, n, 2 * i : 2 * i + 2]
            angle, zeta = (m - n) * 10000 ** (-2 * i / HEAD_DIM), (2 * i / HEAD_DIM + 0.4) / 1.4
            turned_product = (q0 * k0 + q1 * k1) * math.cos(angle) + (q0 * k1 - q1 * k0) * math.sin(angle)
            total = total + turned_product * zeta ** ((m - n) / 8)
        return total / HEAD_DIM**0.5

    loops(positions.XPos(SHAPE, decay=8), score, window, offset)


@pytest.mark.parametrize(("window", "offset"), [(None, 0), (5, 300)])
def test_transformer_xl(window: int | None, offset: int, loops: Callable) -> None:
    position = positions.TransformerXL(SHAPE).double()

    def score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
        angles = [(m - n) * 10000 ** (-2 * i / SHAPE.dim) for i in range(SHAPE.dim // 2)]
        waves = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64)
        r = position.projection[h] @ waves
        return ((q[b, h, m] + position.u[h]) @ k[b, h, n] + (q[b, h, m] + position.v[h]) @ r) / HEAD_DIM**0.5

    loops(position, score, window, offset)


@pytest.mark.parametrize(("clip", "window"), [(0, None), (3, None), (3, 5)])
def test_shaw(clip: int, window: int | None, loops: Callable) -> None:
    position = positions.Shaw(SHAPE, clip=clip).double()

    def score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
        return q[b, h, m] @ (k[b, h, n] + position.key_vectors[min(m - n, clip)]) / HEAD_DIM**0.5

    loops(position, score, window, 5, value_bias=lambda m, n: position.value_vectors[min(m - n, clip)])


@pytest.mark.parametrize(("extent", "window", "temperature"), [(5, None, None), (40, 5, None), (1, 4, 3), (3, None, 2)])
def test_learned_relative_bias(extent: int, window: int | None, temperature: int | None, loops: Callable) -> None:
    position = positions.LearnedRelativeBias(SHAPE, 3, extent, temperature).double()
    for parameter in position.parameters():
        torch.nn.init.normal_(parameter)

    def score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
        mixture = position.weights.view(HEADS, 3, -1)[h] @ x[b, m]
        bias = mixture @ position.curves[:, m - n] if m - n < extent else 0
        seen = m + 1 if window is None else min(window, m + 1)
        factor = 1 if temperature is None else 1 + 0.1 * math.log(max(seen / temperature, 1))
        return (plain_score(q, k, x, b, h, m, n) + bias) * factor

    loops(position, score, window, 300)


def fire(threshold: float) -> positions.FIRE:
    position = positions.FIRE(SHAPE, threshold=threshold).double()
    position.c.data.fill_(0.37)
    position.threshold_scale.data.fill_(1.1)
    return position


@pytest.mark.parametrize("offset", [0, 200])  # above the threshold the bias also depends on m
def test_fire_is_the_papers_network(offset: int, loops: Callable) -> None:
    position = fire(100.0)

    def psi(x: int | Tensor) -> Tensor:
        return torch.log(position.c * x + 1)

    def score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
        far = torch.clamp(position.threshold_scale * 100.0, min=offset + m)
        return plain_score(q, k, x, b, h, m, n) + position.mlp(psi(m - n) / psi(far))[h]

    loops(position, score, offset=offset)


def test_dead_and_flat_units_of_fire_are_pieces_too() -> None:
    position = fire(12.0)
    first = position.mlp[0]
    first.weight.data[:4] = 0.0  # constants, on or off
    first.bias.data[:4] = torch.tensor([1.0, -1.0, 0.0, 2.0])
    first.weight.data[4:6], first.bias.data[4:6] = 0.5, -0.25  # two equal knots
    x = torch.linspace(0, 1, 501, dtype=torch.float64)
    slope, intercept, knots = position._pieces()
    piece = torch.bucketize(x, knots)
    torch.testing.assert_close(slope[:, piece] * x + intercept[:, piece], position.mlp(x[:, None]).T)


@cache
def reflection(position: positions.PaTH, x: Tensor, b: int, h: int, t: int) -> Tensor:
    """Return the matrix H_t of a token."""
    part = slice(h * HEAD_DIM, (h + 1) * HEAD_DIM)
    w = position.up.weight[part] @ position.down.weight @ x[b, t]
    w = w / w.norm()
    beta = 2 * torch.sigmoid(position.gate.weight[h] @ x[b, t] + position.gate.bias[h])
    return torch.eye(HEAD_DIM, dtype=torch.float64) - beta * torch.outer(w, w)


def product_of_reflections(position: Any, q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
    carried = q[b, h, m]
    for t in range(m, n, -1):  # H_m first, H_{n+1} last
        carried = reflection(position, x, b, h, t) @ carried
    return k[b, h, n] @ carried / HEAD_DIM**0.5


@pytest.mark.parametrize("window", [None, 1, 5])
def test_path_is_a_product_of_reflections(window: int | None, loops: Callable, monkeypatch) -> None:
    monkeypatch.setattr(positions.path, "KEYS_AT_ONCE", 2)  # several blocks of keys
    position = positions.PaTH(SHAPE, rank=3).double()
    loops(position, partial(product_of_reflections, position), window)


def test_combined_strategies_keep_separate_states(loops: Callable) -> None:
    position = Combined(SHAPE, [partial(positions.PaTH, rank=3), positions.FoX]).double()
    path_, fox = position.parts

    def score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
        gates = F.logsigmoid(x[b] @ fox.gates.weight[h] + fox.gates.bias[h])
        return product_of_reflections(path_, q, k, x, b, h, m, n) + gates[n + 1 : m + 1].sum()

    loops(position, score)


def dape_inputs(position: positions.DAPE, q: Tensor, k: Tensor, b: int, m: int, n: int) -> Tensor:
    """Return the scores of all heads and their biases, (2H,)."""
    s = torch.stack([plain_score(q, k, q, b, h, m, n) for h in range(HEADS)])
    distance = torch.tensor([float(m - n)], dtype=torch.float64)
    return torch.cat([s, position.over.bias(distance)[:, 0]])


@pytest.mark.parametrize(("window", "over"), [(None, "KerpleLog"), (1, "KerpleLog"), (6, "ALiBi")])
def test_dape_is_a_loop_over_pairs(window: int | None, over: str, loops: Callable, monkeypatch) -> None:
    monkeypatch.setattr(positions.pair_network, "HIDDEN", 60)  # several pieces of pairs
    position = positions.DAPE(SHAPE, positions.strategies()[over], hidden=5).double()
    raw_scores = cache(partial(dape_inputs, position))

    def score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
        both = raw_scores(q, k, b, m, n)
        hidden = F.leaky_relu(position.into.weight @ both + position.into.bias)
        return both[h] + both[HEADS + h] + position.out.weight[h] @ hidden

    loops(position, score, window, offset=3)


@pytest.mark.parametrize("window", [None, 1, 6])
def test_dape_v2_is_two_convolutions_over_seen_keys(window: int | None, loops: Callable) -> None:
    position = positions.DAPEv2(SHAPE, hidden=5).double()
    into = position.into.weight.unflatten(-1, (3, 2 * HEADS))  # (hidden, taps, 2H)
    out = position.out.weight.unflatten(-1, (3, 5))  # (H, taps, hidden)
    raw_scores = cache(partial(dape_inputs, position))

    def score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
        first = 0 if window is None else max(0, m - window + 1)
        both = {i: raw_scores(q, k, b, m, i) for i in range(max(first, n - 2), min(m, n + 2) + 1)}
        hidden = {}
        for i in range(max(first, n - 1), min(m, n + 1) + 1):
            near = [into[:, t] @ both[i + t - 1] for t in range(3) if first <= i + t - 1 <= m]
            hidden[i] = F.leaky_relu(torch.stack(near).sum(0) + position.into.bias)
        added = [out[h, t] @ hidden[n + t - 1] for t in range(3) if n + t - 1 in hidden]
        return both[n][h] + both[n][HEADS + h] + torch.stack(added).sum()

    loops(position, score, window)


@pytest.mark.parametrize("shared", [True, False])
def test_the_operators_of_dapes_network_keep_torch_s_contract(shared: bool) -> None:
    """s, b, into, bias, out of 3 sequences, 2 heads, 23 pairs and 5 hidden numbers; a batch may share b."""
    sizes = [(3, 2, 23), (2, 23) if shared else (3, 2, 23), (5, 4), (5,), (2, 5)]
    inputs = [torch.randn(size, requires_grad=True) for size in sizes]
    opcheck(torch.ops.kerple.pair_network.default, tuple(inputs))
    opcheck(torch.ops.kerple.pair_network_backward.default, (torch.randn(3, 2, 23), *(x.detach() for x in inputs)))
