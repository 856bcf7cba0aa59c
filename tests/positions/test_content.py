"""CoPE and FoX against published code and loops."""

import math

import pytest
import torch

from kerple.positions import CoPE, FoX, QueryKeyBlock, Shape, TokenPositions

HEADS, HEAD_DIM, LENGTH = 3, 8, 40
SHAPE = Shape(HEADS * HEAD_DIM, HEADS, 64)


def pairs(queries: slice, keys: slice, state: torch.Tensor | None = None, offset: int = 0) -> QueryKeyBlock:
    """A block of the first tokens; keys end where queries do."""
    at = TokenPositions.line(queries.stop, offset)
    rows, columns = torch.arange(queries.stop)[queries], torch.arange(queries.stop)[keys]
    return QueryKeyBlock(at[queries], at[keys], rows[:, None] >= columns, state)


ALL = slice(0, LENGTH)


def random(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


def added(ours: CoPE | FoX, q: torch.Tensor, k: torch.Tensor, where: QueryKeyBlock) -> torch.Tensor:
    """What a strategy adds to scores, themselves 0 where a key is not seen."""
    s = (q @ k.mT / math.sqrt(HEAD_DIM)).masked_fill(~where.seen, 0)
    return ours.modify_scores(s, q, k, where) - s


@pytest.mark.parametrize("rows", [4, 64])
def test_cope_is_that_of_x_transformers(rows: int) -> None:
    package = pytest.importorskip("x_transformers.x_transformers")
    ours, theirs = CoPE(SHAPE, rows=rows), package.CoPE(HEAD_DIM, HEADS, rows)
    ours.vectors.data = theirs.pos_emb.data = random(rows, HEAD_DIM)
    q, k = 2 * random(2, 2, HEADS, LENGTH, HEAD_DIM)
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    logits = (q @ k.mT / math.sqrt(HEAD_DIM)).masked_fill(future, -torch.finfo(torch.float32).max)

    torch.testing.assert_close(
        added(ours, q, k, pairs(ALL, ALL)).tril(), theirs(q, logits).tril(), atol=1e-4, rtol=1e-4
    )


def test_fox_is_x_transformers_data_dependent_alibi() -> None:
    package = pytest.importorskip("x_transformers.x_transformers")
    ours, theirs = FoX(SHAPE, start=5.0), package.DataDependentAlibi(SHAPE.dim, HEADS)
    linear = theirs.to_forget_gates[0]
    assert linear.bias.tolist() == ours.gates.bias.tolist()  # both start at 5 here
    ours.gates.load_state_dict(linear.state_dict())
    x = random(2, LENGTH, SHAPE.dim)
    q = k = torch.zeros(2, HEADS, LENGTH, HEAD_DIM)

    torch.testing.assert_close(
        added(ours, q, k, pairs(ALL, ALL, ours.token_state(x, TokenPositions.line(LENGTH), None))).tril(),
        theirs(x).tril(),
        atol=1e-4,
        rtol=1e-4,
    )


def test_fox_keeps_near_gates_precise_after_a_long_past() -> None:
    # prefix sums in fp32 would be off by 0.01 after 100,000 tokens of gates near 0.5
    ours = FoX(SHAPE)
    x = random(1, 100_000, SHAPE.dim)
    q, k = torch.zeros(1, HEADS, 1, HEAD_DIM), torch.zeros(1, HEADS, 100_000, HEAD_DIM)
    at = TokenPositions.line(100_000)
    # in two pieces, as with a cache
    first = ours.token_state(x[:, :99_000], at[:99_000], None)
    state = torch.cat([first, ours.token_state(x[:, 99_000:], at[99_000:], first)], 2)
    got = added(ours, q, k, pairs(slice(99_999, 100_000), slice(0, 100_000), state))

    gates = torch.nn.functional.logsigmoid(ours.gates(x[0, -50:]).double()).T
    expected = gates.flip(-1).cumsum(-1).flip(-1)  # of keys 51 to 2 before the end
    torch.testing.assert_close(got[0, :, 0, -51:-1].double(), expected, atol=1e-5, rtol=1e-6)
