"""Shaw and Transformer-XL against published code and loops."""

import math
from dataclasses import replace

import pytest
import torch

from kerple.attention import Modifiers
from kerple.attention.reference import attend_reference
from kerple.positions import QueryKeyBlock, Shape, Shaw, TokenPositions, TransformerXL

HEADS, HEAD_DIM, LENGTH = 3, 8, 20
SHAPE = Shape(HEADS * HEAD_DIM, HEADS, 64)


def pairs(rows: slice, columns: slice, seen: torch.Tensor, offset: int = 0, contiguous: bool = True) -> QueryKeyBlock:
    at = replace(TokenPositions.line(LENGTH, offset), contiguous=contiguous)
    return QueryKeyBlock(at[rows], at[columns], seen)


def causal(rows: slice, columns: slice) -> torch.Tensor:
    index = torch.arange(LENGTH)
    return index[rows, None] >= index[columns]


ALL = slice(0, LENGTH)


def random(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


@pytest.mark.parametrize("clip", [0, 3])
def test_shaw_is_a_double_loop_in_fp64(clip: int) -> None:
    shaw = Shaw(SHAPE, clip=clip).double()
    q, k, v = random(3, 1, HEADS, 10, HEAD_DIM).double()
    out = attend_reference(
        q,
        k,
        v,
        Modifiers(
            modify_scores=lambda s, q, k, *where: shaw.modify_scores(s, q, k, pairs(*where, offset=5)),
            add_to_output=lambda p, v, *where: shaw.add_to_output(p, v, pairs(*where, offset=5)),
        ),
    )

    for h in range(HEADS):
        for m in range(10):
            e = []
            for n in range(m + 1):
                key = k[0, h, n] + shaw.key_vectors[min(m - n, clip)]
                e.append((q[0, h, m] @ key).item() / math.sqrt(HEAD_DIM))
            alpha = torch.tensor(e, dtype=torch.float64).softmax(0)
            z = sum(alpha[n] * (v[0, h, n] + shaw.value_vectors[min(m - n, clip)]) for n in range(m + 1))
            torch.testing.assert_close(out[0, h, m], z)


def test_transformer_xl_is_xlnets_relative_core() -> None:
    xlnet = pytest.importorskip("transformers.models.xlnet.modeling_xlnet")
    config = xlnet.XLNetConfig(
        d_model=SHAPE.dim, n_head=HEADS, d_inner=8, n_layer=1, vocab_size=5, attn_type="uni", dropout=0.0
    )
    core = xlnet.XLNetRelativeAttention(config).eval()
    model = xlnet.XLNetModel(config)
    ours = TransformerXL(SHAPE)
    core.r_w_bias.data, core.r_r_bias.data = ours.u.data.clone(), ours.v.data.clone()
    q, k, v = random(3, 2, HEADS, LENGTH, HEAD_DIM)
    waves = model.relative_positional_encoding(LENGTH, LENGTH, bsz=2)  # (T + 1, B, D)
    projected = torch.einsum("ibd,hed->ibhe", waves, ours.projection)
    future = torch.ones(LENGTH, LENGTH).triu(1)[:, :, None, None]
    with torch.no_grad():
        expected = core.rel_attn_core(*(x.permute(2, 0, 1, 3) for x in (q, k, v)), projected, attn_mask=future)
        got = attend_reference(
            q, k, v, Modifiers(modify_scores=lambda s, q, k, *where: ours.modify_scores(s, q, k, pairs(*where)))
        )

    torch.testing.assert_close(got, expected.permute(1, 2, 0, 3), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("queries", [slice(0, 20), slice(19, 20), slice(7, 12)])
@pytest.mark.parametrize("first", [0, 3])
def test_transformer_xl_of_any_block_is_a_loop(queries: slice, first: int) -> None:
    ours = TransformerXL(SHAPE).double()
    q, k = random(2, 1, HEADS, LENGTH, HEAD_DIM).double()
    keys = slice(first, queries.stop)
    # by shifting, and by the sum of angles, which is what random positions use
    got, factored = (
        ours.modify_scores(
            torch.zeros(1, HEADS, queries.stop - queries.start, keys.stop - keys.start, dtype=torch.float64),
            q[:, :, queries],
            k[:, :, keys],
            pairs(queries, keys, causal(queries, keys), 7, contiguous),
        )
        for contiguous in (True, False)
    )

    omega = [10000 ** (-2 * i / SHAPE.dim) for i in range(SHAPE.dim // 2)]
    for h in range(HEADS):
        for i, m in enumerate(range(LENGTH)[queries]):
            for j, n in enumerate(range(LENGTH)[keys]):
                if n > m:
                    continue
                waves = [math.sin((m - n) * w) for w in omega] + [math.cos((m - n) * w) for w in omega]
                r = ours.projection[h] @ torch.tensor(waves, dtype=torch.float64)
                expected = (ours.u[h] @ k[0, h, n] + (q[0, h, m] + ours.v[h]) @ r) / math.sqrt(HEAD_DIM)
                torch.testing.assert_close(got[0, h, i, j], expected)
                torch.testing.assert_close(factored[0, h, i, j], expected)
