"""Output and gradients of attention, compared with loops over the formula of a score in the paper of each strategy."""

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
from kerple.attention import query_block_attention
from kerple.base.errors import UserError
from kerple.model import Transformer
from kerple.model.architecture import Architecture
from kerple.model.self_attention import PositionContext, SelfAttention
from kerple.positions import Combined, Position, QueryKeyBlock, Shape, Sink, TokenPositions
from kerple.positions.visibility import Visibility
from kerple.testing import Subject
from kerple.training.language_model import LanguageModel

HEADS, HEAD_DIM, LENGTH = 2, 6, 14
SHAPE = Shape(HEADS * HEAD_DIM, HEADS, 8)
Score = Callable[[Tensor, Tensor, Tensor, int, int, int, int], Tensor]
"""Differentiable function score(q, k, x, b, h, m, n) of query m and key n in head h of sequence b.

q and k are (B, H, T, δ), and x are the hidden states (B, T, D)."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_block_attention, "QUERIES_AT_ONCE", 5)
    monkeypatch.setattr(query_block_attention, "LARGEST_STORED", 0)  # hooks are called again in the backward pass


def compare_with_loops(
    position: Position,
    score: Score,
    window: int | None = None,
    offset: int = 0,
    probabilities: Callable = lambda scores, h: scores.softmax(0),
    value_bias: Callable = lambda m, n: 0.0,
    gate: Callable = lambda x, h: 1.0,
) -> None:
    """Compare attention in fp64 with loops over sequences, heads, queries and keys.

    ``offset`` is the position of the first token. ``probabilities`` maps the scores of the n visible keys, and the
    head, to n probabilities. ``value_bias`` maps a query and a key to a vector that is added to the value of the key.
    ``gate`` maps the hidden state of a token, and the head, to a factor of the token's output.
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
        context = PositionContext(position, TokenPositions.arange(LENGTH, offset), tokens, Visibility(window), option)
        out = attention(x, position, context)
        torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
        gradients = torch.autograd.grad(out, leaves, grad, materialize_grads=True)
        torch.testing.assert_close(gradients, expected_gradients, atol=1e-11, rtol=1e-11)


def plain_score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
    return q[b, h, m] @ k[b, h, n] / HEAD_DIM**0.5


def kerple_log(position: Any, h: int, distance: int) -> Tensor:
    return -position.r1[h] * (1 + position.r2[h] * distance).log()


# a strategy, and the factor of the scores in head h of a query that sees n keys
FACTORS: dict[str, tuple[Callable[[Shape], Position], Callable[[Any, int, int], Any]]] = {
    "SSMax": (positions.SSMax, lambda position, h, n: position.scale[h] * math.log(n)),
    "llama4": (positions.Temperature, lambda _, h, n: 1 + 0.1 * math.log(1 + n // SHAPE.length)),
    "swan": (partial(positions.Temperature, rule="swan"), lambda _, h, n: math.log(7 + n, SHAPE.length)),
    "Sink": (Sink, lambda _, h, n: 1),
    "off by one": (partial(Sink, learnable=False), lambda _, h, n: 1),
    "Combined": (
        partial(Combined, parts=(positions.SSMax, positions.KerpleLog, Sink)),
        lambda position, h, n: position.parts[0].scale[h] * math.log(n),
    ),
}


@pytest.mark.parametrize(("window", "offset"), [(None, 0), (7, 1000)])
@pytest.mark.parametrize("name", FACTORS)
def test_factors_of_queries_and_sinks(name: str, window: int | None, offset: int) -> None:
    build, factor = FACTORS[name]
    position = build(SHAPE).double().eval()  # swan is 1 in training
    for parameter in position.parameters():
        torch.nn.init.uniform_(parameter, 0.2, 1.5)
    sinks = [part.logits for part in position.modules() if isinstance(part, Sink)]

    def score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
        visible = m + 1 if window is None else min(window, m + 1)
        scaled = plain_score(q, k, x, b, h, m, n) * factor(position, h, visible)
        return scaled + kerple_log(position.parts[1], h, m - n) if name == "Combined" else scaled

    def probabilities(scores: Tensor, h: int) -> Tensor:
        return scores.exp() / (scores.exp().sum() + (sinks[0][h].exp() if sinks else 0))

    compare_with_loops(position, score, window, offset, probabilities)


@pytest.mark.parametrize(("window", "offset"), [(None, 0), (9, 1001), (4, 0)])
@pytest.mark.parametrize("group", [1, 3, None])
def test_scores_of_far_keys_use_grouped_distances(group: int | None, window: int | None, offset: int) -> None:
    """A bias and a sink apply to the scores of near and of far keys."""
    near = 5
    strategy = partial(positions.SelfExtend, group=group) if group else positions.ReRoPE
    position = Combined(SHAPE, (positions.KerpleLog, partial(strategy, neighbor_window=near), Sink)).double()
    kerple, _, sink = position.parts
    torch.nn.init.uniform_(sink.logits, 0.2, 1.5)
    frequencies = 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)

    def score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
        distance = m - n
        if distance >= near:
            distance = near if group is None else (m + offset) // group - (n + offset) // group + near - near // group
        query, key = (torch.complex(*row.chunk(2)) for row in (q[b, h, m], k[b, h, n]))
        rotated = (query * key.conj() * torch.polar(torch.ones_like(frequencies), distance * frequencies)).real.sum()
        return rotated / HEAD_DIM**0.5 + kerple_log(kerple, h, m - n)

    compare_with_loops(position, score, window, offset, lambda s, h: s.exp() / (s.exp().sum() + sink.logits[h].exp()))


def test_far_keys_need_no_explicit_scores_and_no_training() -> None:
    network = Transformer(Shape(16, 2, 8), 1, 9, positions.SelfExtend, attention="fused")
    assert network(torch.zeros(1, 40, dtype=torch.int64)).isfinite().all()  # raises without a fused kernel
    with_pope = partial(positions.SelfExtend, position=positions.PoPE)
    assert Transformer(Shape(16, 2, 8), 1, 9, with_pope)(torch.zeros(1, 40, dtype=torch.int64)).isfinite().all()
    model = LanguageModel(partial(Combined, parts=(positions.SelfExtend, Sink)), 9, 8, layers=1, dim=16, heads=2)
    with pytest.raises(UserError, match=r"^model\.position: got Combined, which is only for tests of weights"):
        Trainer(logger=False, fast_dev_run=True, accelerator="cpu").fit(model, [{"tokens": torch.zeros(1, 9).long()}])


@pytest.mark.parametrize("elementwise", [False, True])
def test_an_output_gate_multiplies_the_output_of_attention(elementwise: bool) -> None:
    position = Combined(SHAPE, (positions.ALiBi, partial(positions.OutputGate, elementwise=elementwise))).double()
    slopes, weight = position.parts[0].bias(torch.ones(1)), torch.nn.init.normal_(position.parts[1].gate_weight)
    weight = weight.unflatten(0, (HEADS, -1))  # (H, δ or 1, D)

    def score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
        return plain_score(q, k, x, b, h, m, n) + slopes[h, 0].double() * (m - n)

    compare_with_loops(position, score, gate=lambda x, h: 1 / (1 + (-(weight[h] @ x)).exp()))
    build = partial(Combined, parts=(positions.ALiBi, positions.OutputGate))
    network = Transformer(SHAPE, 1, 9, build, attention="fused")
    network.losses(torch.zeros(1, 40, dtype=torch.int64)).mean().backward()  # raises without a fused kernel


@pytest.mark.parametrize("rest", [False, True])
@pytest.mark.parametrize("window", [None, 7])
def test_stick_breaking(window: int | None, rest: bool) -> None:
    def probabilities(scores: Tensor, h: int) -> Tensor:
        remainder, weights = torch.ones((), dtype=torch.float64), []
        for score in scores[:-1].flip(0):  # the nearest key first; a query does not see itself
            weights.append(remainder * score.sigmoid())
            remainder = remainder * (1 - score.sigmoid())
        return torch.stack([*weights[::-1], remainder if rest else torch.zeros_like(remainder)])

    compare_with_loops(positions.StickBreaking(SHAPE, rest), plain_score, window, probabilities=probabilities)


def test_stick_breaking_is_precise_with_many_keys() -> None:
    """The remainder after 3,000 keys is e^-2,000, which must not affect near keys in fp32."""
    keys, scores = TokenPositions.arange(3000), torch.randn(1, 1, 5, 3000)
    block = QueryKeyBlock(keys[-5:], keys, torch.ones(5, 3000, dtype=torch.bool).tril(2995))
    position = positions.StickBreaking(Shape(8, 1, 16))
    fp32, fp64 = (position.modify_scores(s, s, s, block).p for s in (scores, scores.double()))
    torch.testing.assert_close(fp32.double(), fp64, atol=1e-5, rtol=1e-4)


def test_a_second_derivative_of_stick_breaking_is_an_error_and_not_wrong() -> None:
    scores = torch.randn(1, 1, 4, 4, dtype=torch.float64, requires_grad=True)
    weights = positions.stick_breaking.StickBreakingWeights.apply(scores, torch.ones(4, 4).tril(-1).bool(), None)
    with pytest.raises(UserError, match="create_graph: got True, expected False"):
        torch.autograd.grad((weights**2).sum(), scores, create_graph=True)


@pytest.mark.parametrize("other", [positions.FoX, Sink])
def test_invalid_combinations_with_stick_breaking_are_refused(other: type[Position]) -> None:
    network = Transformer(SHAPE, 1, 9, partial(Combined, parts=(positions.StickBreaking, other)))
    with pytest.raises(UserError, match="replaces the softmax"):
        network(torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.parametrize(("window", "offset"), [(None, 0), (None, 700), (5, 3)])
def test_pope_has_a_learned_angle_of_the_keys(window: int | None, offset: int) -> None:
    position = positions.PoPE(SHAPE, base=500.0, key_phase=None).double()
    assert -2 * math.pi <= position.key_phase.min() < position.key_phase.max() <= 0
    frequencies = torch.tensor([500.0 ** (-c / HEAD_DIM) for c in range(HEAD_DIM)], dtype=torch.float64)

    def score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
        query = torch.polar(F.softplus(q[b, h, m]), m * frequencies)
        key = torch.polar(F.softplus(k[b, h, n]), n * frequencies + position.key_phase.view(HEADS, HEAD_DIM)[h])
        return (query * key.conj()).real.sum() / HEAD_DIM**0.5

    compare_with_loops(position, score, window, offset)


@pytest.mark.parametrize(("window", "offset"), [(None, 0), (5, 700)])
def test_xpos(window: int | None, offset: int) -> None:
    pair = torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM

    def score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
        query, key = (torch.view_as_complex(row.view(-1, 2)) for row in (q[b, h, m], k[b, h, n]))
        decay = ((pair + 0.4) / 1.4) ** ((m - n) / 8)
        return (query * key.conj() * torch.polar(decay, (m - n) * 10000**-pair)).real.sum() / HEAD_DIM**0.5

    compare_with_loops(positions.XPos(SHAPE, decay=8), score, window, offset)


@pytest.mark.parametrize(("window", "offset"), [(None, 0), (5, 300)])
def test_transformer_xl(window: int | None, offset: int) -> None:
    position = positions.TransformerXL(SHAPE).double()

    def score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
        angles = [(m - n) * 10000 ** (-2 * i / SHAPE.dim) for i in range(SHAPE.dim // 2)]
        r = position.projection[h] @ torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64)
        return ((q[b, h, m] + position.u[h]) @ k[b, h, n] + (q[b, h, m] + position.v[h]) @ r) / HEAD_DIM**0.5

    compare_with_loops(position, score, window, offset)


@pytest.mark.parametrize(("clip", "window"), [(0, None), (3, None), (3, 5)])
def test_shaw(clip: int, window: int | None) -> None:
    position = positions.Shaw(SHAPE, clip=clip).double()

    def score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
        return q[b, h, m] @ (k[b, h, n] + position.key_vectors[min(m - n, clip)]) / HEAD_DIM**0.5

    compare_with_loops(position, score, window, 5, value_bias=lambda m, n: position.value_vectors[min(m - n, clip)])


@pytest.mark.parametrize("length", [1, 129])  # one query, also in the last block
def test_shaw_with_a_single_vector_reads_one_query(length: int) -> None:
    tokens, strategy = torch.arange(length)[None] % 9, partial(positions.Shaw, clip=0)
    networks = [
        Transformer(Shape(16, 2, 8), 1, 9, strategy, attention=a).eval() for a in ("auto", "blocks", "reference")
    ]
    for network in networks:
        network.load_state_dict(networks[0].state_dict())
        torch.testing.assert_close(network(tokens), networks[0](tokens))


@pytest.mark.parametrize(("extent", "window", "temperature"), [(5, None, None), (40, 5, None), (1, 4, 3), (3, None, 2)])
def test_learned_relative_bias(extent: int, window: int | None, temperature: int | None) -> None:
    position = positions.LearnedRelativeBias(SHAPE, 3, extent, temperature).double()
    for parameter in position.parameters():
        torch.nn.init.normal_(parameter)

    def score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
        bias = (position.weights.view(HEADS, 3, -1)[h] @ x[b, m]) @ position.curves[:, m - n] if m - n < extent else 0
        visible = m + 1 if window is None else min(window, m + 1)
        factor = 1 if temperature is None else 1 + 0.1 * math.log(max(visible / temperature, 1))
        return (plain_score(q, k, x, b, h, m, n) + bias) * factor

    compare_with_loops(position, score, window, 300)


@pytest.mark.slow  # test_combined_strategies_keep_separate_states is the fast test
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("size", [1.0, 1e6])  # gates of the size 1e6 are exactly 0 or 1
def test_fox(size: float, window: int | None) -> None:
    position = positions.FoX(SHAPE).double()
    torch.nn.init.normal_(position.gates.weight, std=size)

    def score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
        gates = F.logsigmoid(x[b] @ position.gates.weight[h] + position.gates.bias[h])
        return plain_score(q, k, x, b, h, m, n) + gates[n + 1 : m + 1].sum()

    compare_with_loops(position, score, window)


def fire_with_changed_parameters(threshold: float) -> positions.FIRE:
    position = positions.FIRE(SHAPE, threshold=threshold).double()
    position.c.data.fill_(0.37)
    position.threshold_scale.data.fill_(1.1)
    return position


# above the threshold the bias also depends on m, and queries of a block differ in the pieces of many distances
@pytest.mark.parametrize(("threshold", "offset"), [(100.0, 0), (100.0, 200), (4.0, 0)])
def test_fire_is_the_papers_network(threshold: float, offset: int) -> None:
    position = fire_with_changed_parameters(threshold)

    def psi(x: int | Tensor) -> Tensor:
        return torch.log(position.c * x + 1)

    def score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
        largest = torch.clamp(position.threshold_scale * threshold, min=offset + m)
        return plain_score(q, k, x, b, h, m, n) + position.mlp(psi(m - n) / psi(largest))[h]

    compare_with_loops(position, score, offset=offset)


def test_the_pieces_of_fire_equal_its_network_with_constant_units_and_equal_knots() -> None:
    position = fire_with_changed_parameters(12.0)
    first = position.mlp[0]
    first.weight.data[:4] = 0.0  # constant units, active or not
    first.bias.data[:4] = torch.tensor([1.0, -1.0, 0.0, 2.0])
    first.weight.data[4:6], first.bias.data[4:6] = 0.5, -0.25  # two equal knots
    x = torch.linspace(0, 1, 501, dtype=torch.float64)
    slope, intercept, knots = position._pieces()
    piece = torch.bucketize(x, knots)
    torch.testing.assert_close(slope[:, piece] * x + intercept[:, piece], position.mlp(x[:, None]).T)


@cache
def reflection(position: positions.PaTH, x: Tensor, b: int, h: int, t: int) -> Tensor:
    """Return the matrix H_t of a token."""
    w = position.up.weight[slice(h * HEAD_DIM, (h + 1) * HEAD_DIM)] @ position.down.weight @ x[b, t]
    w, beta = w / w.norm(), 2 * torch.sigmoid(position.gate.weight[h] @ x[b, t] + position.gate.bias[h])
    return torch.eye(HEAD_DIM, dtype=torch.float64) - beta * torch.outer(w, w)


def product_of_reflections(position: Any, q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
    query = q[b, h, m]
    for t in range(m, n, -1):  # H_m first, H_{n+1} last
        query = reflection(position, x, b, h, t) @ query
    return k[b, h, n] @ query / HEAD_DIM**0.5


@pytest.mark.parametrize("window", [None, 1, 5])
def test_path_is_a_product_of_reflections(window: int | None, monkeypatch) -> None:
    monkeypatch.setattr(positions.path, "KEYS_AT_ONCE", 2)  # several blocks of keys
    position = positions.PaTH(SHAPE, rank=3).double()
    compare_with_loops(position, partial(product_of_reflections, position), window)


def test_combined_strategies_keep_separate_states() -> None:
    position = Combined(SHAPE, [partial(positions.PaTH, rank=3), positions.FoX]).double()
    path, fox = position.parts

    def score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
        gates = F.logsigmoid(x[b] @ fox.gates.weight[h] + fox.gates.bias[h])
        return product_of_reflections(path, q, k, x, b, h, m, n) + gates[n + 1 : m + 1].sum()

    compare_with_loops(position, score)


@pytest.mark.parametrize("last", [positions.CoPE, positions.DAPE])
@torch.no_grad()
def test_a_state_in_fp64_leaves_the_scores_of_other_parts_in_their_dtype(last: type[Position]) -> None:
    parts = [partial(positions.PaTH, rank=3), positions.FoX, last]  # FoX has a state in fp64
    network = Transformer(SHAPE, 1, 9, partial(Combined, parts=parts)).eval()
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(network(tokens), network.double()(tokens).float(), rtol=1e-4, atol=1e-5)


def dape_inputs(position: positions.DAPE, q: Tensor, k: Tensor, b: int, m: int, n: int) -> Tensor:
    """Return the scores of all heads and their biases, (2H,)."""
    s = torch.stack([plain_score(q, k, q, b, h, m, n) for h in range(HEADS)])
    return torch.cat([s, position.over.bias(torch.tensor([float(m - n)], dtype=torch.float64))[:, 0]])


@pytest.mark.parametrize(("window", "over"), [(None, "KerpleLog"), (1, "KerpleLog"), (6, "ALiBi")])
def test_dape_is_a_loop_over_pairs(window: int | None, over: str, monkeypatch) -> None:
    monkeypatch.setattr(positions.pair_network, "HIDDEN_AT_ONCE", 60)  # several pieces
    position = positions.DAPE(SHAPE, positions.strategies()[over], hidden=5).double()
    inputs_of = cache(partial(dape_inputs, position))

    def score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
        inputs = inputs_of(q, k, b, m, n)
        hidden = F.leaky_relu(position.into.weight @ inputs + position.into.bias)
        return inputs[h] + inputs[HEADS + h] + position.out.weight[h] @ hidden

    compare_with_loops(position, score, window, offset=3)


def test_dape_in_fp64_adds_a_bias_without_parameters() -> None:
    network = Subject(partial(positions.DAPE, over=positions.Sandwich, hidden=3)).network(16).double()
    assert network(torch.arange(16)[None]).dtype == torch.float64


@pytest.mark.parametrize("name", ["DAPE", "DAPEv2"])
def test_dape_with_fp32_parameters_corrects_fp64_scores(name: str) -> None:
    network = Subject(positions.strategies()[name]).network(16).double()
    network.positions.float()  # as in a retrofitted model in fp64
    assert network(torch.arange(16)[None]).dtype == torch.float64


@pytest.mark.parametrize("window", [None, 1, 6])
def test_dape_v2_is_two_convolutions_over_seen_keys(window: int | None, monkeypatch) -> None:
    monkeypatch.setattr(positions.pair_network, "HIDDEN_AT_ONCE", 60)  # several pieces
    position = positions.DAPEv2(SHAPE, hidden=5).double()
    w1 = position.into.weight.unflatten(-1, (3, 2 * HEADS))  # (hidden, taps, 2H)
    w2 = position.out.weight.unflatten(-1, (3, 5))  # (H, taps, hidden)
    inputs_of = cache(partial(dape_inputs, position))

    def score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
        first = 0 if window is None else max(0, m - window + 1)
        inputs, hidden = {i: inputs_of(q, k, b, m, i) for i in range(max(first, n - 2), min(m, n + 2) + 1)}, {}
        for i in range(max(first, n - 1), min(m, n + 1) + 1):
            terms = [w1[:, t] @ inputs[i + t - 1] for t in range(3) if first <= i + t - 1 <= m]
            hidden[i] = F.leaky_relu(torch.stack(terms).sum(0) + position.into.bias)
        corrections = [w2[h, t] @ hidden[n + t - 1] for t in range(3) if n + t - 1 in hidden]
        return inputs[n][h] + inputs[n][HEADS + h] + torch.stack(corrections).sum()

    compare_with_loops(position, score, window)


@pytest.mark.parametrize(("taps", "shared"), [(1, True), (1, False), (3, True), (3, False)])
def test_the_operators_of_dapes_network_keep_torch_s_contract(taps: int, shared: bool) -> None:
    """The operators have 3 sequences, 2 heads, 4 queries of 6 keys and 5 hidden units; a batch may share b."""
    seen = torch.ones(4, 6, dtype=torch.bool).tril(2)
    seen = seen if shared else seen.expand(3, 1, 4, 6)
    b = (2, 4, 6) if shared else (3, 2, 4, 6)
    s, b, *weights = (
        torch.randn(size, requires_grad=True)
        for size in [(3, 2, 4, 6), b, (5, 2 * taps), (5, 2 * taps), (5,), (2 * taps, 5)]
    )
    opcheck(torch.ops.kerple.pair_network.default, (s, b, seen, *weights))
    detached = [x.detach() for x in (s, b, seen, *weights)]
    opcheck(torch.ops.kerple.pair_network_backward.default, (torch.randn(3, 2, 4, 6), *detached))
