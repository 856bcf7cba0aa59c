"""Rotations recovered from queries and keys of equal tokens, and their comparison with what is expected."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kerple.positions.angles import frequencies
from kerple.probe.expected import Layer

ANGLE = 2e-3  # largest error of an angle in radians, beside rounding
RATIO = 2e-3  # largest relative error of a norm
ROUNDING = 4e-7  # of an angle, relative to it: frequency, position and product are fp32
NOISE = 2e-5  # of an entry of a query in fp32, relative to the query


@dataclass(frozen=True)
class Rotation:
    """How the queries or keys of equal tokens differ between positions.

    Args:
        ids: Positions (T,) int64, the first is 0.
        layout: How channels are paired, see `kerple.positions.RoPE`.
        turns: Factor of each pair at each position relative to position 0, (T, r/2) complex.
        noise: Rounding of each pair, relative to its norm, (r/2,).
        residual: Largest part of a pair that is no complex factor, relative to its norm.
        rest: Norm of the channels that are not paired at each position, relative to position 0, (T, 1), or (T, 0).
    """

    ids: Tensor
    layout: str
    turns: Tensor
    noise: Tensor
    residual: float
    rest: Tensor

    @property
    def frequencies(self) -> Tensor:
        """Radians per position of each pair, (r/2,), refined at positions 1, 2, 4, ... as far as they agree."""
        found: Tensor | None = None
        where = {int(p): i for i, p in enumerate(self.ids)}
        for step in (1 << k for k in range(40)):
            if step not in where:
                continue
            angle = self.turns[where[step]].angle()
            change = angle if found is None else torch.angle(torch.exp(1j * (angle - step * found)))
            if found is not None and bool((change.abs() > 0.5).any()):
                break
            found = change / step if found is None else found + change / step
        return torch.zeros(self.turns.shape[1]) if found is None else found


def rotation(x: Tensor, ids: Tensor, paired: int) -> Rotation:
    """The rotation of queries or keys (H, T, δ) of equal tokens, in the layout of pairs that leaves less unexplained.

    Args:
        x: Queries or keys.
        ids: Their positions (T,) int64, the first is 0.
        paired: Number of channels that are paired.
    """
    x = x.double()
    scale = x[:, 0].square().mean().sqrt().clamp(min=1e-30)
    found = []
    half, rest = paired // 2, x[..., paired // 2 * 2 :]
    along = (rest * rest[:, :1]).sum((0, 2))[:, None] / rest[:, 0].square().sum().clamp(min=1e-30)
    along = along[:, : rest.shape[-1]]  # none without such channels
    for layout, first, second in (
        ("half", slice(half), slice(half, 2 * half)),
        ("interleaved", slice(0, 2 * half, 2), slice(1, 2 * half, 2)),
    ):
        z = torch.complex(x[..., first], x[..., second])  # (H, T, r/2)
        norm = z[:, 0].abs().square().sum(0).clamp(min=1e-30)  # (r/2,)
        turns = (z * z[:, :1].conj()).sum(0) / norm
        left = (z - turns * z[:, :1]).abs().square().sum(0).sqrt() / norm.sqrt()  # (T, r/2)
        noise = NOISE * scale * math.sqrt(len(x)) / norm.sqrt()
        found.append(Rotation(ids, layout, turns, noise, float((left - noise).clamp(min=0).max()), along))
    return min(found, key=lambda r: r.residual)


def differences(x: Tensor, what: str, rows: Tensor, ids: Tensor, layer: Layer) -> tuple[list[str], Rotation]:
    """What the rotation of queries or keys does that the configuration does not say, and the rotation.

    Args:
        x: Queries or keys (H, T, δ) of equal tokens.
        what: Their name in messages.
        rows: Numbers of the tokens in the input, (T,) int64.
        ids: Their positions, (T,) int64.
        layer: What the configuration says.
    """
    f = layer.frequencies
    found = rotation(x, ids, x.shape[-1] if f is None else f.dim)
    expected = torch.zeros(found.turns.shape[1], dtype=torch.float64) if f is None else f(ids).flatten()
    factor = layer.query_factor(rows, ids) if what == "queries" else torch.ones(len(ids), dtype=torch.float64)
    if found.residual > RATIO:
        return [f"{what}: positions do more than rotate pairs of channels, {found.residual:.1%} of a pair"], found
    angles = ids[:, None] * expected  # (T, r/2)
    error = torch.angle(found.turns * torch.exp(-1j * angles)).abs()
    wrong = error > ANGLE + ROUNDING * angles + found.noise
    messages = []
    if bool(wrong.any()):
        messages.append(f"{what}: {_angles(found, expected, error, wrong, layer)}")
    norms = torch.cat([found.turns.abs(), found.rest], 1)  # (T, r/2 or r/2 + 1)
    error = (norms / factor[:, None] - 1).abs() - torch.cat([found.noise, found.noise.new_zeros(found.rest.shape[1])])
    if float(error.max()) > RATIO:
        t, pair = divmod(int(error.argmax()), norms.shape[1])
        messages.append(
            f"{what}: the norm of channels at position {int(ids[t])} is {float(norms[t, pair]):.4g} times that at "
            f"position 0, expected {float(factor[t]):.4g}"
        )
    return messages, found


def _angles(found: Rotation, expected: Tensor, error: Tensor, wrong: Tensor, layer: Layer) -> str:
    """Describe wrong angles: another frequency, or another position."""
    measured, first = found.frequencies, int(wrong.any(1).nonzero()[0])
    span = int(found.ids.max())
    pair = int(error.amax(0).argmax())
    if bool(((measured - expected).abs() * span < 0.1).all()) or (expected == 0).all():
        if (expected == 0).all():
            return f"rotated by up to {float(measured.abs().max()):.4g} radians per position, expected no rotation"
        places = torch.exp(1j * torch.arange(span + 1)[:, None] * expected)
        best = int((places.conj() * found.turns[first]).real.sum(1).argmax())
        return f"position {int(found.ids[first])} is rotated as position {best}"
    assert layer.frequencies is not None, "else no rotation is expected"
    scaling, bare = layer.frequencies.scaling, frequencies(layer.frequencies.dim, layer.frequencies.base, error.device)
    hint = ""
    if bool((measured.abs() * span < ANGLE).all()):
        hint = "; nothing is rotated"
    elif scaling and bool(((measured - bare).abs() < 1e-3 * bare + ANGLE / span).all()):
        hint = f"; these are the frequencies without {scaling}"
    return (
        f"pair {pair} rotates by {float(measured[pair]):.4g} radians per position, expected "
        f"{float(expected[pair]):.4g}; the angle is wrong by {float(error[:, pair].max()):.2g} radians or less, "
        f"from position {int(found.ids[first])} on{hint}"
    )
