"""SSMax, Llama 4's temperature, sinks and stick-breaking against loops in fp64, gradients too."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from kerple.attention import attend
from kerple.attention.blocks import attend_blocks
from kerple.positions import FoX, KerpleLog, Position, Shape, Sink, SSMax, StickBreaking, Temperature, Together
from tests.positions.attended import attended

HEADS, HEAD_DIM, LENGTH = 2, 4, 40
SHAPE = Shape(HEADS * HEAD_DIM, HEADS, 16)
Rows = Callable[[Position, Tensor, Tensor, int], tuple[Tensor, Tensor | None]]


def ssmax(position: SSMax, z: Tensor, h: Tensor, m: int) -> tuple[Tensor, Tensor | None]:
    return position.scale[h] * math.log(len(z)) * z, None


def temperature(position: Temperature, z: Tensor, h: Tensor, m: int) -> tuple[Tensor, Tensor | None]:
    return z * (1 + 0.1 * math.log(1 + math.floor((m + 1) / 16))), None


def sink(position: Sink, z: Tensor, h: Tensor, m: int) -> tuple[Tensor, Tensor | None]:
    return z, position.logits[h]


def together(position: Together, z: Tensor, h: Tensor, m: int) -> tuple[Tensor, Tensor | None]:
    kerple, scale, last = position.parts[1], position.parts[0].scale, position.parts[2].logits
    d = torch.arange(len(z) - 1, -1, -1, dtype=torch.float64)
    bias = -kerple.r1[h] * (1 + kerple.r2[h] * d).log()
    return scale[h] * math.log(len(z)) * z + bias, last[h]


CASES: dict[str, tuple[Callable[[Shape], Position], Rows]] = {
    "SSMax": (SSMax, ssmax),
    "Temperature": (Temperature, temperature),
    "Sink": (Sink, sink),
    "off by one": (lambda shape: Sink(shape, learnable=False), sink),
    "Together": (lambda shape: Together(shape, (SSMax, KerpleLog, Sink)), together),
}


def inputs() -> Iterator[Tensor]:
    random = torch.Generator().manual_seed(0)
    for shape in ([(1, HEADS, LENGTH, HEAD_DIM)] * 3) + [(1, LENGTH, SHAPE.dim)]:
        yield torch.randn(shape, dtype=torch.float64, generator=random).requires_grad_()


def agree(position: Position, explicit: Callable[..., Tensor], window: int | None, offset: int) -> None:
    """Values and gradients of every way of attending are those of the loop, to 1e-12."""
    q, k, v, x = inputs()
    leaves = [q, k, v, *position.parameters()]
    wanted = explicit(position, q, k, v, window)
    grad = torch.randn(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = [wanted, *torch.autograd.grad(wanted, leaves, grad)]
    for way in (attend, attend_blocks):
        out = attended(way, position, q, k, v, x, window, offset)
        for got, right in zip([out, *torch.autograd.grad(out, leaves, grad)], expected, strict=True):
            torch.testing.assert_close(got, right, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("offset", [0, 1000])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("name", CASES)
def test_it_is_a_loop(name: str, window: int | None, offset: int) -> None:
    build, rows = CASES[name]
    torch.manual_seed(0)
    position = build(SHAPE).double()
    for parameter in position.parameters():
        torch.nn.init.uniform_(parameter, 0.2, 1.5)

    def explicit(position: Position, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        out = []
        for h in range(HEADS):
            for m in range(LENGTH):
                first = 0 if window is None else max(0, m - window + 1)
                z = k[0, h, first : m + 1] @ q[0, h, m] / math.sqrt(HEAD_DIM)
                s, none = rows(position, z, h, m)
                total = s.exp().sum() + (0 if none is None else none.exp())
                out.append((s.exp() / total) @ v[0, h, first : m + 1])
        return torch.stack(out).unflatten(0, (1, HEADS, LENGTH))

    agree(position, explicit, window, offset)


@pytest.mark.parametrize("rest", [False, True])
@pytest.mark.parametrize("window", [None, 7])
def test_stick_breaking_is_a_loop(window: int | None, rest: bool) -> None:
    def explicit(position: Position, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        out = []
        for h in range(HEADS):
            for m in range(LENGTH):
                left, row = torch.ones((), dtype=torch.float64), torch.zeros(HEAD_DIM, dtype=torch.float64)
                for n in range(m - 1, -1 if window is None else max(-1, m - window), -1):  # the nearest first
                    share = torch.sigmoid(q[0, h, m] @ k[0, h, n] / math.sqrt(HEAD_DIM))
                    row = row + left * share * v[0, h, n]
                    left = left * (1 - share)
                out.append(row + left * v[0, h, m] if rest else row)
        return torch.stack(out).unflatten(0, (1, HEADS, LENGTH))

    agree(StickBreaking(SHAPE, rest), explicit, window, 0)


def test_a_stick_of_many_keys_is_broken_in_full_precision() -> None:
    """What 3,000 keys leave of the stick is e^-2,000: near keys do not notice in fp32."""
    q, k, v = torch.randn(3, 1, 1, 3000, 8, generator=torch.Generator().manual_seed(0))
    position, x = StickBreaking(Shape(8, 1, 16)), torch.zeros(1, 3000, 8)
    wanted = attended(attend_blocks, position, q.double(), k.double(), v.double(), x)

    torch.testing.assert_close(attended(attend, position, q, k, v, x).double(), wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((StickBreaking, FoX), "got one that modifies scores after one that gives weights"),
        ((StickBreaking, Sink), "got a sink and a strategy that gives weights"),
    ],
)
def test_what_cannot_be_together_with_stick_breaking_is_said(parts: tuple, message: str) -> None:
    q, k, v, x = inputs()
    with pytest.raises(ValueError, match=message):
        attended(attend, Together(SHAPE, parts).double(), q, k, v, x)
