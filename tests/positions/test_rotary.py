"""RoPE, its scalings and xPos against published code; queries and keys go through the whole rotation."""

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kerple.positions import RoPE, Shape, TokenPositions, XPos

HEADS, HEAD_DIM = 3, 16
SHAPE = Shape(HEADS * HEAD_DIM, HEADS, 64)


def qk(length: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, HEADS, length, HEAD_DIM), torch.randn(2, HEADS, length, HEAD_DIM)


def close(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_the_half_layout_is_llamas() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    q, k = qk(200)
    cos, sin = llama.LlamaRotaryEmbedding(llama_config({"rope_type": "default"}))(q, torch.arange(200)[None])

    close(
        RoPE(SHAPE, base=500.0).transform_qk(q, k, None, TokenPositions.line(200)),
        llama.apply_rotary_pos_emb(q, k, cos, sin),
    )


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_interleaved_layout_is_gpt_js(share: float) -> None:
    gptj = pytest.importorskip("transformers.models.gptj.modeling_gptj")
    q, k = qk(200)
    turned = int(share * HEAD_DIM)
    sin, cos = gptj.create_sinusoidal_positions(200, turned).chunk(2, -1)

    def theirs(x: Tensor) -> Tensor:
        x = x.transpose(1, 2)  # (B, T, H, δ)
        out = gptj.apply_rotary_pos_emb(x[..., :turned], sin[None], cos[None])
        return torch.cat([out, x[..., turned:]], -1).transpose(1, 2)

    ours = RoPE(SHAPE, share=share, layout="interleaved").transform_qk(q, k, None, TokenPositions.line(200))
    close(ours, (theirs(q), theirs(k)))


def llama_config(rope: dict[str, Any]) -> Any:
    llama = pytest.importorskip("transformers").LlamaConfig
    return llama(
        hidden_size=SHAPE.dim,
        num_attention_heads=HEADS,
        max_position_embeddings=64,
        rope_parameters={"rope_theta": 500.0} | rope,
    )


RAMP = {"beta_fast": 4.0, "beta_slow": 0.5}  # from dimension 1 to 4; the usual 32 and 1 have it from 0 to 3


@pytest.mark.parametrize("length", [40, 300])
@pytest.mark.parametrize(
    ("scaling", "factor", "rope"),
    [
        ("pi", 4.0, {"rope_type": "linear", "factor": 4.0}),
        ("dynamic_ntk", 2.0, {"rope_type": "dynamic", "factor": 2.0}),
        ("yarn", 16.0, {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64}),
        ("yarn", 4.0, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, **RAMP}),
    ],
)
def test_scalings_are_those_of_transformers(scaling: Any, factor: float, rope: dict[str, Any], length: int) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    q, k = qk(length)
    cos, sin = llama.LlamaRotaryEmbedding(llama_config(rope))(q, torch.arange(length)[None])
    ramp = {"fast": rope["beta_fast"], "slow": rope["beta_slow"]} if "beta_fast" in rope else {}
    ours = RoPE(SHAPE, base=500.0, scaling=scaling, factor=factor, **ramp)

    close(ours.transform_qk(q, k, None, TokenPositions.line(length)), llama.apply_rotary_pos_emb(q, k, cos, sin))


def test_ntk_is_that_of_x_transformers() -> None:
    package = pytest.importorskip("x_transformers.x_transformers")
    q, k = qk(200)
    freqs, scale = package.RotaryEmbedding(HEAD_DIM, base_rescale_factor=8.0)(torch.arange(200))
    ours = RoPE(SHAPE, scaling="ntk", factor=8.0, layout="interleaved")

    close(
        ours.transform_qk(q, k, None, TokenPositions.line(200)),
        (package.apply_rotary_pos_emb(q, freqs, scale), package.apply_rotary_pos_emb(k, freqs, scale)),
    )


def test_the_mistake_is_what_torch_makes_of_bf16() -> None:
    t = torch.arange(3000, dtype=torch.bfloat16)
    turns = (1 / 10000 ** (torch.arange(0, 16, 2).double() / 16)).bfloat16()
    angle = torch.outer(t, turns).double()  # rounded to bf16
    x = torch.randn(1, 1, 3000, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wrong = RoPE(Shape(dim=16, heads=1, length=64), mistake="bf16")
    found, _ = wrong.transform_qk(x, x, None, TokenPositions.line(3000))
    a, b = x.chunk(2, -1)
    expected = torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert not wrong.shift_invariant
    assert len(set(angle[:, 0].tolist())) < 900  # of 3,000 positions


def test_angles_are_exact_far_out() -> None:
    # fp32 angles would be off by 0.004 here
    q, k = qk(1)
    where = torch.tensor([40_007])
    got, _ = RoPE(SHAPE).transform_qk(q, k, None, TokenPositions(torch.arange(1), where))

    for i in range(HEAD_DIM // 2):
        angle = 40_007 * 10000 ** (-2 * i / HEAD_DIM)
        a, b = q[0, 0, 0, i].item(), q[0, 0, 0, i + HEAD_DIM // 2].item()
        assert got[0, 0, 0, i].item() == pytest.approx(a * math.cos(angle) - b * math.sin(angle), abs=1e-5)


def torchscale_xpos() -> ModuleType:
    # the leaf file by its path: the package imports fairscale and timm, which nothing here needs
    spec = importlib.util.find_spec("torchscale")
    if spec is None or spec.origin is None:
        pytest.skip("torchscale is not installed")
    path = Path(spec.origin).parent / "component" / "xpos_relative_position.py"
    leaf = importlib.util.spec_from_file_location("torchscale_xpos", path)
    assert leaf is not None
    assert leaf.loader is not None
    module = sys.modules.setdefault(leaf.name, importlib.util.module_from_spec(leaf))
    leaf.loader.exec_module(module)
    return module


def scores(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT).tril()  # (B, H, T, T)


def test_xpos_is_torchscales() -> None:
    length = 300
    theirs = torchscale_xpos().XPOS(HEAD_DIM, scale_base=64)
    q, k = qk(length)
    by_them = [theirs(x.flatten(0, 1), downscale=d).view_as(x) for x, d in ((q, False), (k, True))]

    # they count from the middle of the input, we do not: products are what can be compared
    ours = scores(*XPos(SHAPE, decay=64).transform_qk(q, k, None, TokenPositions.line(length)))
    torch.testing.assert_close(ours, scores(*by_them), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("first", [0, 100_000])
def test_xpos_decays_exactly_over_63_times_its_decay(first: int) -> None:
    q = k = torch.ones(1, 1, 1, 2).expand(1, 1, 4032, 2)
    rotated_q, rotated_k = XPos(Shape(2, 1, 64), decay=64, base=1e30).transform_qk(
        q, k, None, TokenPositions.line(4032, first)
    )

    for distance in (0, 1, 64, 500):
        product = (rotated_q[0, 0, -1] * rotated_k[0, 0, -1 - distance]).sum().item()
        expected = 2 * math.cos(distance) * (0.4 / 1.4) ** (distance / 64)
        assert product == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_xpos_overflows_nothing_in_half_precision() -> None:
    q = k = torch.full((1, 1, 1, 2), 20.0, dtype=torch.float16).expand(1, 1, 8192, 2)
    position, at = XPos(Shape(2, 1, 64), base=1e30), TokenPositions.line(8192)
    for x in position.transform_qk(q, k, None, at):
        assert x.isfinite().all()
        assert x.abs().amax(-1).min() > 0
    rotated_q, rotated_k = (x[0, 0].float() for x in position.transform_qk(q, k, None, at))
    product = (rotated_q[2559] * rotated_k[2559 - 500]).sum().item() / 400
    assert product == pytest.approx(2 * math.cos(500) * (0.4 / 1.4) ** (500 / 512), abs=0.01)  # within 5 · 512 tokens
