"""Implementations of attention against explicit attention in fp64, with gradients by autograd."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kerple.attention import AttentionSpec, attend, cpu, query_block_attention
from kerple.attention.backend_selection import FEW_KEYS, AttentionOption
from kerple.attention.query_block_attention import attend_blocks
from kerple.attention.reference import attend_reference, attention_probabilities
from kerple.base.errors import UserError
from kerple.positions import QueryKeyBlock, TokenPositions
from kerple.positions.fox import FORGOTTEN
from kerple.positions.fp32_matmul import product
from tests.attention.test_flex_on_cpu import first_keys

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def inputs(batch: int, heads: int, queries: int, keys: int, dtype: torch.dtype, dim: int = 16) -> list[Tensor]:
    """Return q, k, v and the output's gradient, in fp64, with values that ``dtype`` can represent."""
    shapes = [(batch, heads, queries, dim), *[(batch, heads, keys, dim)] * 2, (batch, heads, queries, dim)]
    return [torch.randn(shape).to(dtype).double() for shape in shapes]


def error(got: Tensor, expected: Tensor) -> float:
    """Return the relative error, or the absolute error if the expected value is 0 (gradients with a single key)."""
    size = expected.norm().item()
    return (got.double() - expected).norm().item() / (size if size > 1e-9 else 1.0)


def compare_options(tensors: list[Tensor], grad: Tensor, spec: Callable[..., AttentionSpec], *options: str) -> None:
    """Compare outputs and gradients in fp64. ``tensors`` are q, k, v and the arguments of ``spec``."""
    results = []
    for option in ("reference", *options):
        leaves = [x.double().clone().requires_grad_() for x in tensors]
        out = attend(*leaves[:3], spec(*leaves[3:]), option)
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
        torch.testing.assert_close(results[-1], results[0], atol=1e-12, rtol=1e-11)


def compare(
    implementation, dtype: torch.dtype, batch: int, heads: int, queries: int, keys: int, window=None, table=None
) -> None:
    """Compare output and gradients with those of explicit attention. A table of random biases is the default."""
    q, k, v, grad = inputs(batch, heads, queries, keys, dtype)
    table = torch.randn(heads, keys + 3).double() if table is None else table
    results = []
    for attention, kind in ((attend_reference, torch.float64), (implementation, dtype)):
        leaves = [x.to(kind, copy=True).requires_grad_() for x in (q, k, v)]
        leaves.append(table.to(torch.promote_types(kind, torch.float32), copy=True).requires_grad_())
        # the layout of a model, (B, T, H, δ) in memory
        qkv = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in leaves[:3]]
        out = attention(*qkv, AttentionSpec(table=leaves[3], window=window))
        assert out.dtype == kind
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad.to(kind))])
    for name, expected, got in zip(("out", "q", "k", "v", "table"), *results, strict=True):
        assert error(got, expected) < TOLERANCE[dtype], name


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(
    ("implementation", "batch", "heads", "queries", "keys"),
    [
        (attend, 1, 1, 1, 1),
        (attend, 3, 12, 63, 63),
        (attend, 2, 5, 600, 600),
        (attend, 2, 3, 1, 300),  # the queries are the last rows
        (attend, 2, 3, 200, 300),
        (attend_blocks, 2, 3, 300, 300),
    ],
)
def test_gradients_are_those_of_explicit_attention(
    implementation, dtype, window, batch, heads, queries, keys, monkeypatch
) -> None:
    monkeypatch.setattr(query_block_attention, "LARGEST_STORED", 0)  # blocks are computed again in the backward pass
    compare(implementation, dtype, batch, heads, queries, keys, window)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(
    "biases", [("table",), ("key_bias",), ("table", "key_bias", "first_key", "sink"), ("first_key",)]
)
def test_one_query_without_gradients_is_explicit_attention(dtype, window, biases) -> None:
    """As in generation, with query heads that share key heads, narrower values, and the strides of a cache."""
    q, k, v, _ = inputs(3, 6, 1, 300, dtype)
    k, v = k[:, :2], v[:, :2, :, :12]
    kind = torch.promote_types(dtype, torch.float32)
    options = {
        "table": torch.randn(6, 303).to(kind), "key_bias": torch.randn(3, 6, 300).double().cumsum(-1),
        "first_key": torch.tensor([[0], [270], [299]]), "sink": torch.randn(6),
    }  # fmt: skip
    spec = AttentionSpec(window=window, **{name: options[name] for name in biases})
    expected = attend_reference(q, k, v, spec)
    for ours in ((q, k, v), [x.mT.contiguous().mT for x in (q, k, v)]):
        with torch.no_grad():
            out = attend(*(x.to(dtype) for x in ours), spec)
        assert out.dtype == dtype
        assert error(out, expected) < TOLERANCE[dtype]


def test_a_steep_table_has_a_finite_gradient() -> None:
    """With biases down to -4,000, probabilities underflow. The backward pass clamps exponents, which changes no sum."""
    table = -torch.tensor([4.0, 0.5])[:, None] * torch.arange(1000)
    compare(attend, torch.float32, 1, 2, 1000, 1000, table=table.double())  # NaN is not below the tolerance


def test_long_inputs_use_larger_blocks() -> None:
    compare(attend, torch.float32, 1, 1, 2100, 2100)  # two blocks of 768 queries and one of 564


def test_attention_to_few_keys_is_computed_in_fp32() -> None:
    q, k, v, _ = (x.bfloat16() for x in inputs(4, 3, FEW_KEYS, FEW_KEYS, torch.bfloat16))
    table = torch.randn(3, FEW_KEYS)
    exact = attend_reference(q.double(), k.double(), v.double(), AttentionSpec(table=table.double()))
    differs = attend(q, k, v, AttentionSpec(table=table)) != exact.bfloat16()
    assert differs.double().mean() < 0.02  # only where fp32 rounding crosses the middle of two bf16 numbers


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("argument", range(3))
def test_attention_accepts_any_strides(argument, window) -> None:
    """torch's fused kernel reads wrong memory if the entries of a row are not contiguous."""
    tensors, table = [x.float() for x in inputs(2, 3, 70, 70, torch.float32)[:3]], torch.randn(3, 70)
    for x in (tensors[argument].mT.contiguous().mT, tensors[argument][..., :1].expand(tensors[argument].shape)):
        strided, dense = ([*tensors[:argument], y, *tensors[argument + 1 :]] for y in (x, x.contiguous()))
        expected = attend_reference(*(y.double() for y in dense), AttentionSpec(table=table.double(), window=window))
        assert error(attend(*strided, AttentionSpec(table=table, window=window)), expected) < 1e-5


def test_gradients_are_deterministic() -> None:
    q, k, v, grad = (x.float().requires_grad_() for x in inputs(3, 4, 300, 300, torch.float32))
    table = torch.randn(4, 300, requires_grad=True)
    runs = [torch.autograd.grad(attend(q, k, v, AttentionSpec(table=table)), (q, k, v, table), grad) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_weights_new_scores_sinks_and_output_terms_in_blocks_are_those_of_explicit_attention() -> None:
    batch, heads, length, dim = 2, 3, 300, 8
    *qkv, grad = inputs(batch, heads, length, length, torch.float64, dim)
    shapes = [*[(heads, length)] * 3, (dim, dim), (batch, heads, length)]

    def spec(table: Tensor, weight: Tensor, gate: Tensor, matrix: Tensor, sink: Tensor) -> AttentionSpec:
        def modify_scores(s: Tensor, q: Tensor, k: Tensor, block: QueryKeyBlock) -> tuple[Tensor, Tensor]:
            gates = gate[:, block.queries.rows, None], gate[:, None, block.keys.rows]
            new = s + (q @ matrix @ k.transpose(-1, -2)) * gates[0] + gates[1]
            return new, (s * block.seen).sum(-1) / 100

        def add_to_output(p: Tensor, v: Tensor, block: QueryKeyBlock) -> Tensor:
            gates = gate[:, block.queries.rows, None], gate[:, None, block.keys.rows]
            return (p * block.seen * gates[1]) @ v.square() * gates[0]

        functions = {"modify_scores": modify_scores, "add_to_output": add_to_output}
        keys = TokenPositions.arange(length)
        return AttentionSpec(table=table, score_scale=weight, sink=sink, keys=keys, window=170, **functions)

    compare_options([*qkv, *(torch.rand(*shape, dtype=torch.float64) for shape in shapes)], grad, spec, "auto")


def forgotten(
    batch: int, heads: int, length: int, zeros: float, start: float = 1.0, closed: float = FORGOTTEN
) -> Tensor:
    """Return cumulative sums of log gates, negated, (B, H, T) fp64. A fraction ``zeros`` of them are ``closed``."""
    gates = torch.nn.functional.logsigmoid(torch.randn(batch, heads, length, dtype=torch.float64) + start)
    return -torch.where(torch.rand(gates.shape) < zeros, closed, gates).cumsum(-1)


@pytest.mark.parametrize("zeros", [0.0, 0.3])
@pytest.mark.parametrize("starts", [None, [[0, 7, 150], [0, 290]]])
@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize(
    ("queries", "names"),
    [
        (300, ["key_bias"]),
        (20, ["key_bias", "sink"]),
        (300, ["key_bias", "table", "score_scale", "sink"]),
        (30, ["score_scale"]),
    ],
)
def test_biases_of_keys_and_factors_in_tiles_are_those_of_explicit_attention(
    queries: int, names: list[str], window: int | None, starts: list[list[int]] | None, zeros: float
) -> None:
    q, k, v, grad = inputs(2, 3, queries, 300, torch.float64, 8)
    k, v = k[:, :1], v[:, :1]  # query heads share a key head
    tensors = {"key_bias": forgotten(2, 3, 300, zeros), "table": torch.randn(3, 302).double()}
    tensors |= {"score_scale": torch.rand(3, 301).double(), "sink": torch.randn(3).double()}
    first_key = None if starts is None else first_keys(300, starts)[:, 300 - queries :]
    build = partial(AttentionSpec, window=window, first_key=first_key)
    leaves = [q, k, v, *(tensors[name] for name in names)]
    compare_options(leaves, grad, lambda *x: build(**dict(zip(names, x, strict=True))), "fused", "blocks")


@pytest.mark.parametrize("heads", [1, 3])
def test_biases_of_keys_without_a_table_use_torchs_kernel(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "TiledForward", None)
    q, k, v, _ = inputs(1, heads, 200, 200, torch.float64, 8)
    spec = AttentionSpec(key_bias=forgotten(1, heads, 200, 0.05))
    torch.testing.assert_close(attend(q, k, v, spec), attend_reference(q, k, v, spec), atol=1e-12, rtol=1e-11)


@pytest.mark.parametrize("names", [["key_bias"], ["score_scale"]])
@pytest.mark.parametrize("window", [None, 60])
def test_a_table_that_is_one_row_for_all_heads_is_added(names: list[str], window: int | None) -> None:
    """Without a table, the kernels for the CPU get rows of zeros with the stride 0."""
    q, k, v, grad = inputs(1, 3, 600, 600, torch.float64, 8)
    tensors = {"key_bias": forgotten(1, 3, 600, 0.3), "score_scale": torch.rand(3, 601).double()}
    row = -torch.rand(1, 602).double().cumsum(-1)
    build = partial(AttentionSpec, window=window)
    leaves = [q, k, v, row, *(tensors[name] for name in names)]
    compare_options(leaves, grad, lambda row, x: build(table=row.expand(3, -1), **{names[0]: x}), "fused")


@pytest.mark.parametrize("extent", [0, 5])
@pytest.mark.parametrize("names", [[], ["table", "score_scale", "sink"]])
@pytest.mark.parametrize("starts", [None, [[0, 7, 60], [0, 80]]])
@pytest.mark.parametrize(("queries", "window"), [(90, None), (90, 50), (20, None)])
def test_near_keys_and_far_keys_together_are_explicit_attention(
    queries: int, window: int | None, starts: list[list[int]] | None, names: list[str], extent: int
) -> None:
    q, k, v, grad = inputs(2, 4, queries, 90, torch.float64, 8)
    k, v = k[:, :2], v[:, :2]
    tensors = {"table": torch.randn(4, 90), "score_scale": torch.rand(4, 90), "sink": torch.randn(4)}
    bias = [torch.randn(2, 4, queries, 3), torch.randn(3, extent + 1), torch.randn(extent + 1, 8)]
    first_key = None if starts is None else first_keys(90, starts)[:, 90 - queries :]

    def spec(features: Tensor, curves: Tensor, value_bias: Tensor, *others: Tensor) -> AttentionSpec:
        options = dict(zip(names, others, strict=True)) | {"query_bias": (features, curves), "value_bias": value_bias}
        return AttentionSpec(window=window, first_key=first_key, keys=TokenPositions.arange(90), **options)

    compare_options([q, k, v, *bias, *(tensors[name] for name in names)], grad, spec, "fused", "blocks")


def test_biases_by_query_use_the_distances_of_positions_with_gaps() -> None:
    q, k, v, _ = inputs(1, 2, 50, 50, torch.float64, 8)
    keys = TokenPositions(torch.arange(50), 3 * torch.arange(50), contiguous=False)
    features, curves, vectors = torch.randn(1, 2, 50, 3), torch.randn(3, 8), torch.randn(8, 8)
    features, curves, vectors = features.double(), curves.double(), vectors.double()
    distance = (keys.ids[:, None] - keys.ids).clamp(0, 7)
    p = q @ k.mT / 8**0.5 + (features @ curves)[0, :, torch.arange(50)[:, None], distance]
    p = p.masked_fill(torch.ones(50, 50).triu(1) > 0, -torch.inf).softmax(-1)
    expected = p @ v + (p[..., None] * vectors[distance]).sum(-2)
    for option in ("auto", "blocks", "reference"):
        out = attend(q, k, v, AttentionSpec(query_bias=(features, curves), value_bias=vectors, keys=keys), option)
        torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)


def limit_of_error(q: Tensor, k: Tensor, v: Tensor) -> float:
    """Return 1.5 times the error of torch without biases. With some processors, it is 7e-6 for 131,072 keys."""
    attention = torch.nn.functional.scaled_dot_product_attention
    return max(1e-6, 1.5 * error(attention(q.float(), k.float(), v.float()), attention(q, k, v)))


@pytest.mark.parametrize("zeros", [0.0, 0.05])
@pytest.mark.parametrize("start", [-1.0, 12.0])
@pytest.mark.parametrize("length", [16_384, pytest.param(131_072, marks=pytest.mark.slow)])
def test_biases_of_keys_lose_no_precision_in_long_inputs(length: int, start: float, zeros: float) -> None:
    """The last queries see gates whose logarithms sum to as little as -170,000; fp32 has steps of 0.016 there."""
    q, k, v, _ = inputs(1, 1, 40, length, torch.float32, 8)
    key_bias = forgotten(1, 1, length, zeros, start)
    exact = attend_reference(q, k, v, AttentionSpec(key_bias=key_bias))
    ours = attend(q.float(), k.float(), v.float(), AttentionSpec(key_bias=key_bias))
    assert error(ours, exact) < limit_of_error(q, k, v)


@pytest.mark.parametrize("length", [16_384, pytest.param(131_072, marks=pytest.mark.slow)])
def test_a_few_near_keys_among_many_lose_no_precision(length: int) -> None:
    """The far keys have nearly all probability, and their values cancel: those of near keys are much of the output."""
    q, k, v, _ = inputs(1, 1, 40, length, torch.float32, 8)
    v, spec = v[..., :4], AttentionSpec(neighbor_window=10)  # the halves of q and k are for near and for far keys
    exact = attend_reference(q, k, v, spec)
    assert error(attend(q.float(), k.float(), v.float(), spec), exact) < limit_of_error(q[..., :4], k[..., :4], v)


@pytest.mark.parametrize("largest", [0.0, FORGOTTEN / 2])
@pytest.mark.parametrize("option", ["auto", "blocks"])
def test_biases_of_keys_lose_no_precision_between_near_keys(option: AttentionOption, largest: float) -> None:
    """Gates as at the start of training: the biases of a block of queries differ by about 100; or closed gates."""
    q, k, v, _ = inputs(1, 4, 400, 400, torch.float32, 32)
    key_bias = forgotten(1, 4, 400, 0.1, start=0.0, closed=largest)
    exact = attend_reference(q, k, v, AttentionSpec(key_bias=key_bias))
    out = attend(q.float(), k.float(), v.float(), AttentionSpec(key_bias=key_bias), option)
    assert (out - exact).abs().max() < 2e-6


@pytest.mark.parametrize("window", [None, 9])
def test_forward_mode_is_refused_because_its_derivatives_would_be_0(window: int | None) -> None:
    q, k, v = torch.randn(3, 1, 2, 40, 8)
    spec = AttentionSpec(table=torch.randn(2, 40), window=window)
    for function in (lambda q: attend(q, k, v, spec), lambda q: product(q, q.mT)):
        with pytest.raises(
            UserError, match=r"^jvp: got differentiation in forward mode, expected reverse mode: torch\.autograd\.grad$"
        ):
            torch.func.jvp(function, (q,), (q,))


@pytest.mark.slow
def test_the_custom_operators_keep_torchs_contract() -> None:
    q, k, v, _ = (x.float().requires_grad_() for x in inputs(2, 3, 20, 20, torch.float32))
    table = torch.randn(3, 20, requires_grad=True)
    forward = (q, k, v, table, None, 0.25)
    optional = None, torch.randn(2, 3, 20, requires_grad=True).double(), torch.rand(3, 20, requires_grad=True)
    for others in (optional, (first_keys(20, [[0, 7], [0, 19]]),)):
        torch.library.opcheck(torch.ops.kerple.table_attention.default, (*forward, *others))
    with torch.no_grad():
        out, lse = torch.ops.kerple.table_attention.default(*forward)
    tensors = [x.detach() for x in (q, k, v, table, out, lse)]
    for learned in (True, False):
        arguments = (tensors, torch.randn_like(out), torch.randn_like(lse), None, 0.25, learned)
        torch.library.opcheck(torch.ops.kerple.table_attention_backward.default, arguments)


OTHER_QUERIES = [torch.zeros(2, 5, dtype=torch.int64), torch.zeros(6, dtype=torch.int64), torch.zeros(2, 6)]
EXPECTED = r"first_key: got shape .*, expected \(B, Tq\) = \(2, 6\) torch.int64"
DECREASING = torch.tensor([[0, 0, 0, 3, 3, 5], [0, 1, 1, 3, 2, 2]])


@pytest.mark.parametrize(
    ("queries", "options", "message"),
    [
        (7, {}, "q: got .*expected"),
        (6, {"table": torch.zeros(2, 5)}, "table: got .*expected"),
        (6, {"sink": torch.zeros(3)}, "sink: got .*expected"),
        *((6, {name: 0}, f"{name}: got 0, expected at least 1 key") for name in ("window", "neighbor_window")),
        *((6, {"first_key": first_key}, EXPECTED) for first_key in OTHER_QUERIES),
        (6, {"first_key": DECREASING}, "first_key: got decreasing rows, expected rows that do not decrease"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(queries: int, options: dict[str, Any], message: str) -> None:
    q, k, v, _ = inputs(2, 2, queries, 6, torch.float32)
    with pytest.raises(UserError, match=f"^{message}"):
        attend(q, k, v[..., :8], AttentionSpec(**options))


@pytest.mark.parametrize("spread", [1.0, 3.0])
@pytest.mark.parametrize("implementation", [attend, attend_blocks])
def test_bf16_scores_are_not_rounded_before_the_softmax(implementation, spread: float) -> None:
    """The errors in bf16, compared with fp64, are at most 1.5 times those of torch's fused kernel."""
    q, k, v, grad = inputs(2, 4, 300, 300, torch.bfloat16, dim=64)
    q, k = ((x * spread**0.5).bfloat16().double() for x in (q, k))  # the scores have the standard deviation ``spread``

    def errors(attention) -> list[float]:
        results = []
        for function, kind in ((attend_reference, torch.float64), (attention, torch.bfloat16)):
            leaves = [x.to(kind).requires_grad_() for x in (q, k, v)]
            out = function(*leaves)
            results.append([out, *torch.autograd.grad(out, leaves, grad.to(kind))])
        return [error(got, expected) for expected, got in zip(*results, strict=True)]

    fused = errors(partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True))
    ours = errors(partial(implementation, spec=AttentionSpec(table=torch.zeros(4, 300))))
    assert all(a <= 1.5 * b for a, b in zip(ours, fused, strict=True)), (ours, fused)


@pytest.mark.parametrize("implementation", [attend, attend_blocks])
def test_gradients_of_bf16_probabilities_are_not_rounded(implementation) -> None:
    """The gradient of the table is that of exact scores, given the output."""
    q, k, v, grad = (x.bfloat16() for x in inputs(2, 3, 300, 300, torch.bfloat16))
    q = q * 4  # distinct probabilities, at which dP and its mean nearly cancel
    table = torch.randn(3, 300, requires_grad=True)
    out = implementation(q, k, v, AttentionSpec(table=table))
    out.backward(grad)
    p = attention_probabilities(q.double(), k.double(), AttentionSpec(table=table.detach().double()))
    dp = grad.double() @ v.double().mT
    mean = (p * dp).sum(-1) if implementation is attend_blocks else (grad.double() * out.double()).sum(-1)
    ds = (p * (dp - mean[..., None])).sum(0)
    expected = torch.stack([ds.diagonal(-d, 1, 2).sum(-1) for d in range(300)], -1)
    assert table.grad is not None
    assert error(table.grad, expected) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("others", [[], ["table", "sink"], ["score_scale"], ["first_key"]])
def test_the_gradient_of_key_biases_sums_to_zero(dtype: torch.dtype, others: list[str]) -> None:
    """A bias that all keys of a sequence have changes no result. FoX sums these gradients over all later tokens."""
    q, k, v, grad = (x.to(dtype) for x in inputs(2, 3, 600, 600, dtype))
    tensors = {"table": torch.randn(3, 600), "sink": torch.randn(3), "score_scale": torch.rand(3, 600)}
    tensors["first_key"] = first_keys(600, [[0, 7, 350], [0, 590]])
    key_bias = forgotten(2, 3, 600, 0.0).float().requires_grad_()
    attend(q, k, v, AttentionSpec(key_bias=key_bias, **{name: tensors[name] for name in others})).backward(grad)
    assert key_bias.grad is not None
    assert (key_bias.grad.sum(-1).abs() < 1e-5 * key_bias.grad.abs().sum(-1)).all()


def test_scores_and_gradients_of_probabilities_ignore_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, grad = (x.float().requires_grad_() for x in inputs(1, 2, 40, 40, torch.float32))
    settings, matmul, before = [], torch.matmul, torch.get_float32_matmul_precision()

    def record(a: Tensor, b: Tensor) -> Tensor:
        if (out := matmul(a, b)).shape[2:] == (40, 40):
            settings.append(torch.get_float32_matmul_precision())
        return out

    monkeypatch.setattr(torch, "matmul", record)
    try:
        torch.set_float32_matmul_precision("high")
        attend_blocks(q, k, v, AttentionSpec()).backward(grad)
    finally:
        torch.set_float32_matmul_precision(before)
    assert settings == ["highest"] * 2  # the scores, and dP


def test_a_term_of_the_output_is_computed_from_unrounded_probabilities() -> None:
    q, k, v, _ = (x.bfloat16() for x in inputs(1, 2, 40, 40, torch.bfloat16))
    exact = attention_probabilities(q.double(), k.double(), AttentionSpec())

    def add_to_output(p: Tensor, v: Tensor, block: QueryKeyBlock) -> Tensor:
        assert error(p, exact) < 1e-6
        return p @ v

    spec = AttentionSpec(add_to_output=add_to_output, keys=TokenPositions.arange(40))
    assert attend(q, k, v, spec).dtype == torch.bfloat16


def test_gradients_of_keys_and_values_are_not_summed_over_blocks_in_bf16() -> None:
    *qkv, grad = inputs(1, 2, 512, 512, torch.bfloat16)
    results = []
    for kind, queries_at_once in ((torch.float64, 512), (torch.bfloat16, 512), (torch.bfloat16, 16)):
        leaves = [x.to(kind, copy=True).requires_grad_() for x in qkv]
        attend_blocks(*leaves, AttentionSpec(), queries_at_once).backward(grad.to(kind))
        results.append([x.grad for x in leaves])
    exact, one_block, blocks = results
    for expected, of_one, of_blocks in zip(exact, one_block, blocks, strict=True):
        assert error(of_blocks, expected) < 2 * error(of_one, expected)  # the gradient of each block is rounded
