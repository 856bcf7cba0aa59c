"""CoPE and FoX against published code and loops."""

import math

import pytest
import torch

from kerple.positions import CoPE, FoX, QueryKeyBlock, Shape, TokenPositions

HEADS, HEAD_DIM, LENGTH = 3, 8, 40
SHAPE = Shape(HEADS * HEAD_DIM, HEADS, 64)


def added(
    position: CoPE | FoX, q: torch.Tensor, k: torch.Tensor, state: torch.Tensor | None = None, keys: int = LENGTH
) -> torch.Tensor:
    """What a strategy adds to the scores of the last queries, themselves 0 where a key is not seen."""
    at, queries = TokenPositions.line(keys), q.shape[2]
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    s = (q @ k.mT / math.sqrt(HEAD_DIM)).masked_fill(~seen, 0)
    return (position.modify_scores(s, q, k, QueryKeyBlock(at[-queries:], at, seen, state)) - s) * seen


@pytest.mark.parametrize("rows", [4, 64])
def test_cope_is_that_of_x_transformers(rows: int) -> None:
    package = pytest.importorskip("x_transformers.x_transformers")
    ours, theirs = CoPE(SHAPE, rows=rows), package.CoPE(HEAD_DIM, HEADS, rows)
    ours.vectors.data = theirs.pos_emb.data = torch.randn(rows, HEAD_DIM)
    q, k = 2 * torch.randn(2, 2, HEADS, LENGTH, HEAD_DIM)
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    logits = (q @ k.mT / math.sqrt(HEAD_DIM)).masked_fill(future, -torch.finfo(torch.float32).max)
    torch.testing.assert_close(added(ours, q, k), theirs(q, logits).tril(), atol=1e-4, rtol=1e-4)


def test_fox_is_x_transformers_data_dependent_alibi() -> None:
    package = pytest.importorskip("x_transformers.x_transformers")
    ours, theirs = FoX(SHAPE, start=5.0), package.DataDependentAlibi(SHAPE.dim, HEADS)
    linear = theirs.to_forget_gates[0]
    assert linear.bias.tolist() == ours.gates.bias.tolist()  # both start at 5 here
    ours.gates.load_state_dict(linear.state_dict())
    x, q = torch.randn(2, LENGTH, SHAPE.dim), torch.zeros(2, HEADS, LENGTH, HEAD_DIM)
    state = ours.token_state(x, TokenPositions.line(LENGTH), None)
    torch.testing.assert_close(added(ours, q, q, state), theirs(x).tril(), atol=1e-4, rtol=1e-4)


def test_fox_keeps_near_gates_precise_after_a_long_past() -> None:
    # prefix sums in fp32 would be off by 0.01 after 100,000 tokens of gates near 0.5
    ours, at = FoX(SHAPE), TokenPositions.line(100_000)
    x, q, k = torch.randn(1, 100_000, SHAPE.dim), torch.zeros(1, HEADS, 1, 8), torch.zeros(1, HEADS, 100_000, 8)
    first = ours.token_state(x[:, :99_000], at[:99_000], None)  # in two pieces, as with a cache
    state = torch.cat([first, ours.token_state(x[:, 99_000:], at[99_000:], first)], 2)
    bias = added(ours, q, k, state, 100_000)
    gates = torch.nn.functional.logsigmoid(ours.gates(x[0, -50:]).double()).T
    expected = gates.flip(-1).cumsum(-1).flip(-1)  # of keys 51 to 2 before the end
    torch.testing.assert_close(bias[0, :, 0, -51:-1].double(), expected, atol=1e-5, rtol=1e-6)
