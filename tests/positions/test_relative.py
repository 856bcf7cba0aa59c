"""Shaw and Transformer-XL against published code and loops."""

import math

import pytest
import torch
from torch import Tensor

from kerple.attention import Modifiers
from kerple.attention.reference import attend_reference
from kerple.positions import QueryKeyBlock, Shape, Shaw, TokenPositions, TransformerXL

HEADS, HEAD_DIM, LENGTH = 3, 8, 20
SHAPE = Shape(HEADS * HEAD_DIM, HEADS, 64)


def block_of(rows: slice, columns: slice, seen: Tensor) -> QueryKeyBlock:
    at = TokenPositions.line(LENGTH, offset=5)
    return QueryKeyBlock(at[rows], at[columns], seen)


@pytest.mark.parametrize("clip", [0, 3])
def test_shaw_is_a_double_loop_in_fp64(clip: int) -> None:
    shaw = Shaw(SHAPE, clip=clip).double()
    q, k, v = torch.randn(3, 1, HEADS, 10, HEAD_DIM, dtype=torch.float64)
    modifiers = Modifiers(
        modify_scores=lambda s, q, k, *where: shaw.modify_scores(s, q, k, block_of(*where)),
        add_to_output=lambda p, v, *where: shaw.add_to_output(p, v, block_of(*where)),
    )
    out = attend_reference(q, k, v, modifiers)
    for h in range(HEADS):
        for m in range(10):
            rows = [min(m - n, clip) for n in range(m + 1)]
            e = [q[0, h, m] @ (k[0, h, n] + shaw.key_vectors[r]) / math.sqrt(HEAD_DIM) for n, r in enumerate(rows)]
            alpha = torch.stack(e).softmax(0)
            z = sum(alpha[n] * (v[0, h, n] + shaw.value_vectors[r]) for n, r in enumerate(rows))
            torch.testing.assert_close(out[0, h, m], z)


def test_transformer_xl_is_xlnets_relative_core() -> None:
    xlnet = pytest.importorskip("transformers.models.xlnet.modeling_xlnet")
    config = xlnet.XLNetConfig(
        d_model=SHAPE.dim, n_head=HEADS, d_inner=8, n_layer=1, vocab_size=5, attn_type="uni", dropout=0.0
    )
    core, ours = xlnet.XLNetRelativeAttention(config).eval(), TransformerXL(SHAPE)
    core.r_w_bias.data, core.r_r_bias.data = ours.u.data.clone(), ours.v.data.clone()
    q, k, v = torch.randn(3, 2, HEADS, LENGTH, HEAD_DIM)
    waves = xlnet.XLNetModel(config).relative_positional_encoding(LENGTH, LENGTH, bsz=2)  # (T + 1, B, D)
    projected = torch.einsum("ibd,hed->ibhe", waves, ours.projection)
    future = torch.ones(LENGTH, LENGTH).triu(1)[:, :, None, None]
    modifiers = Modifiers(modify_scores=lambda s, q, k, *where: ours.modify_scores(s, q, k, block_of(*where)))
    expected = core.rel_attn_core(*(x.permute(2, 0, 1, 3) for x in (q, k, v)), projected, attn_mask=future)
    out = attend_reference(q, k, v, modifiers)
    torch.testing.assert_close(out, expected.permute(1, 2, 0, 3), atol=1e-4, rtol=1e-4)
