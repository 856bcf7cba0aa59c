"""Queries and keys that RoPE, its scalings and xPos have rotated, against published code and formulas."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kerple.model import Transformer
from kerple.positions import PoPE, Position, RoPE, Shape, TokenPositions, XPos, angles

HEADS, HEAD_DIM = 3, 16
SHAPE = Shape(HEADS * HEAD_DIM, HEADS, 64)
close = partial(torch.testing.assert_close, atol=1e-4, rtol=1e-4)


def rotated(position: Position, q: Tensor, k: Tensor, offset: int = 0) -> tuple[Tensor, Tensor]:
    """Return queries and keys with the positions ``offset``, ``offset`` + 1, …, rotated by a strategy."""
    return position.transform_qk(q, k, None, TokenPositions.arange(q.shape[2], offset))


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Rotate x (…, δ) by the angles (…, δ/2) in the layout ``half``."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_the_interleaved_layout_is_gpt_js(fraction: float) -> None:
    gptj = pytest.importorskip("transformers.models.gptj.modeling_gptj")
    q, k = torch.randn(2, 2, HEADS, 200, HEAD_DIM)
    dims = int(fraction * HEAD_DIM)
    sin, cos = gptj.create_sinusoidal_positions(200, dims).chunk(2, -1)

    def theirs(x: Tensor) -> Tensor:
        x = x.transpose(1, 2)  # (B, T, H, δ)
        out = gptj.apply_rotary_pos_emb(x[..., :dims], sin[None], cos[None])
        return torch.cat([out, x[..., dims:]], -1).transpose(1, 2)

    close(rotated(RoPE(SHAPE, rotary_fraction=fraction, layout="interleaved"), q, k), (theirs(q), theirs(k)))


RAMP = {"beta_fast": 4.0, "beta_slow": 0.5}  # the ramp is from pair 1 to 4; with 32 and 1 it is from 0 to 3
DIVISORS = {"short_factors": [1.0 + i / 8 for i in range(8)], "long_factors": [1.5 + i for i in range(8)]}
HALF = {name: divisors[:4] for name, divisors in DIVISORS.items()}
SCALINGS: list[dict[str, Any]] = [
    {},
    {"scaling": "pi", "factor": 4.0},
    {"scaling": "dynamic_ntk", "factor": 2.0},
    {"scaling": "yarn", "factor": 4.0},
    {"scaling": "yarn", "factor": 4.0, "rotary_fraction": 0.5, "attention_factor": 1.3, **RAMP},
    {"scaling": "llama3", "factor": 8.0},
    {"scaling": "llama3", "factor": 8.0, "rotary_fraction": 0.5, **RAMP},
    {"scaling": "longrope", "factor": 8.0, **DIVISORS},
    {"scaling": "longrope", "factor": 8.0, "rotary_fraction": 0.5, **HALF},
    {"scaling": "proportional", "rotary_fraction": 0.5},
    {"scaling": "proportional", "rotary_fraction": 0.25, "factor": 4.0},
]
THEIR_NAMES = {None: "default", "pi": "linear", "dynamic_ntk": "dynamic"}


@pytest.mark.parametrize("length", [40, 300])
@pytest.mark.parametrize("options", SCALINGS)
def test_scalings_are_those_of_transformers(options: dict[str, Any], length: int) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    utilities, scaling = pytest.importorskip("transformers.modeling_rope_utils"), options.get("scaling")
    name = THEIR_NAMES.get(scaling, scaling)
    rope = {"rope_theta": 500.0, "original_max_position_embeddings": 64, "rope_type": name, "factor": 1.0, **options}
    rope |= {"short_factor": options.get("short_factors"), "long_factor": options.get("long_factors")}
    rope |= {"low_freq_factor": options.get("beta_slow", 1.0), "high_freq_factor": options.get("beta_fast", 4.0)}
    rope |= {"partial_rotary_factor": options.get("rotary_fraction", 1.0)}
    sizes = {"hidden_size": SHAPE.dim, "num_attention_heads": HEADS, "max_position_embeddings": 64}
    config = llama.LlamaConfig(**sizes, rope_parameters=rope)
    ours, ids = RoPE(SHAPE, base=500.0, **options), torch.arange(length)
    if scaling is not None:
        expected, factor = utilities.ROPE_INIT_FUNCTIONS[name](config, seq_len=length)
        torch.testing.assert_close(
            ours.frequencies(ids[-1:]).squeeze(0), expected, rtol=5e-7, atol=0, check_dtype=False
        )
        assert ours.attention_factor == pytest.approx(factor, rel=1e-12)
    if scaling == "proportional" or "rotary_fraction" not in options:
        q, k = torch.randn(2, 2, HEADS, length, HEAD_DIM)
        cos, sin = llama.LlamaRotaryEmbedding(config)(q, ids[None])
        close(rotated(ours, q, k), llama.apply_rotary_pos_emb(q, k, cos, sin))


def test_ntk_is_that_of_x_transformers() -> None:
    package = pytest.importorskip("x_transformers.x_transformers")
    q, k = torch.randn(2, 2, HEADS, 200, HEAD_DIM)
    freqs, scale = package.RotaryEmbedding(HEAD_DIM, base_rescale_factor=8.0)(torch.arange(200))
    theirs = tuple(package.apply_rotary_pos_emb(x, freqs, scale) for x in (q, k))
    close(rotated(RoPE(SHAPE, scaling="ntk", factor=8.0, layout="interleaved"), q, k), theirs)


def test_the_bf16_mistake_equals_rotation_in_bf16() -> None:
    t = torch.arange(3000, dtype=torch.bfloat16)
    angle = torch.outer(t, (1 / 10000 ** (torch.arange(0, 16, 2).double() / 16)).bfloat16()).double()  # rounded to bf16
    x = torch.randn(1, 1, 3000, 16, dtype=torch.float64)
    position = RoPE(Shape(dim=16, heads=1, length=64), mistake="bf16")
    torch.testing.assert_close(rotated(position, x, x)[0], rotate(x, angle), rtol=1e-12, atol=1e-12)
    assert not position.shift_invariant
    assert len(set(angle[:, 0].tolist())) < 900  # of 3,000 positions


def test_angles_are_exact_at_large_positions() -> None:
    x = torch.randn(1, 1, 1, HEAD_DIM)
    angle = 40_007 * 10000 ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)  # in fp32 off by 0.004
    q, _ = rotated(RoPE(SHAPE), x, x, offset=40_007)
    torch.testing.assert_close(q.double(), rotate(x.double(), angle), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("first", "default_dtype"), [(0, torch.float32), (100_000, torch.bfloat16)])
def test_xpos_decays_exactly_over_63_times_its_decay(first: int, default_dtype: torch.dtype) -> None:
    ones = torch.ones(1, 1, 1, 2).expand(1, 1, 4032, 2)
    torch.set_default_dtype(default_dtype)  # bf16 in a forward pass with the precision bf16-true
    try:
        q, k = rotated(XPos(Shape(2, 1, 64), decay=64, base=1e30), ones, ones, first)
    finally:
        torch.set_default_dtype(torch.float32)
    for distance in (0, 1, 64, 500):
        product = (q[0, 0, -1] * k[0, 0, -1 - distance]).sum().item()
        assert product == pytest.approx(2 * math.cos(distance) * (0.4 / 1.4) ** (distance / 64), rel=1e-3, abs=1e-6)


def test_xpos_has_neither_overflow_nor_underflow_in_half_precision() -> None:
    x = torch.full((1, 1, 1, 2), 20.0, dtype=torch.float16).expand(1, 1, 8192, 2)
    q, k = rotated(XPos(Shape(2, 1, 64), base=1e30), x, x)
    for y in (q, k):
        assert y.isfinite().all()
        assert y.abs().amax(-1).min() > 0
    product = (q[0, 0, 2559].float() * k[0, 0, 2559 - 500].float()).sum().item() / 400
    assert product == pytest.approx(2 * math.cos(500) * (0.4 / 1.4) ** (500 / 512), abs=0.01)  # within 5 · 512 tokens


@pytest.mark.parametrize("strategy", [RoPE, XPos, PoPE])
def test_angles_are_computed_once_per_forward_pass(strategy: type[Position], monkeypatch: pytest.MonkeyPatch) -> None:
    network, calls, frequencies = Transformer(SHAPE, 3, 20, strategy), [], angles.frequencies
    for module in ("angles", "rotary_scaling"):
        monkeypatch.setattr(
            f"kerple.positions.{module}.frequencies", lambda *options: calls.append(1) or frequencies(*options)
        )
    for forward in (1, 2):
        network.losses(torch.randint(20, (2, 9))).mean().backward()
        assert len(calls) == forward
