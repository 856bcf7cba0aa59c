"""Recovery of rotations from queries and keys of equal tokens, and their comparison with a configuration."""

import math

import torch
from torch import Tensor

from kerple.positions.angles import frequencies
from kerple.probe.expected import Layer

ANGLE = 2e-3  # largest error of an angle in radians, in addition to rounding
RATIO = 2e-3  # largest relative error of a norm
ROUNDING = 4e-7  # largest relative rounding error of an angle: frequency, position and product are fp32
NOISE = 2e-5  # rounding error of an entry of a query in fp32, relative to the norm of the query


def rotation_differences(x: Tensor, what: str, rows: Tensor, ids: Tensor, layer: Layer) -> tuple[list[str], Tensor]:
    """Compare the rotation of the queries or keys of equal tokens with a configuration.

    Args:
        x: Queries or keys (H, T, δ) of equal tokens.
        what: ``queries``, which may be multiplied by a temperature, or ``keys``.
        rows: Indices of the tokens in the input, (T,) int64.
        ids: Positions of the tokens, (T,) int64; the first is 0.
        layer: The configuration of the layer.

    Returns:
        Messages about differences, and the measured radians per position, without pairs of channels whose values are
        too close to 0 to measure them.
    """
    x, f = x.double().cpu(), layer.frequencies
    half = (x.shape[-1] if f is None else f.dim) // 2
    expected = torch.zeros(half, dtype=x.dtype) if f is None else f(ids).flatten().cpu()
    factor = layer.query_factor(rows, ids) if what == "queries" else torch.ones(len(ids), dtype=x.dtype)
    # factors of the pairs relative to position 0, (T, r/2) complex, in the layout with the smaller residual
    layouts = ((slice(half), slice(half, 2 * half)), (slice(0, 2 * half, 2), slice(1, 2 * half, 2)))
    rotations, noise, residual = min((_factors(x, *channels) for channels in layouts), key=lambda result: result[2])
    clear = noise < 0.01  # whether a pair is not close to 0
    measured = _frequencies(rotations, ids)
    if residual > RATIO:
        return [
            f"positions change channels by more than a rotation of pairs: {residual:.1%} of the norm of a pair"
        ], measured[clear]
    messages, angles = [], ids[:, None] * expected  # (T, r/2)
    error = torch.angle(rotations * torch.exp(-1j * angles)).abs()
    wrong = error > ANGLE + ROUNDING * angles + noise
    if bool(wrong.any()):
        pair, hint = int(error.amax(0).argmax()), ""
        if f is not None and f.scaling is not None:
            bare = frequencies(f.dim, f.base, ids.device)
            same = bool(((measured - bare).abs() < 1e-3 * bare + ANGLE / int(ids.max()))[clear].all())
            hint = f"; these are the frequencies without {f.scaling}" if same else ""
        messages.append(
            f"pair {pair} rotates by {float(measured[pair]):.4g} radians per position, expected "
            f"{float(expected[pair]):.4g}; angles are wrong from position {int(ids[wrong.any(1)][0])} on, by up to "
            f"{float(error.max()):.2g} radians{hint}"
        )
    rest = x[..., 2 * half :]  # channels that are not rotated
    along = (rest * rest[:, :1]).sum((0, 2)) / rest[:, 0].square().sum().clamp(min=1e-30)
    norms = torch.cat([rotations.abs(), along[:, None][:, : rest.shape[-1]]], 1) / factor[:, None]
    error = (norms - 1).abs() - torch.nn.functional.pad(noise, (0, norms.shape[1] - half))
    if float(error.max()) > RATIO:
        t, pair = divmod(int(error.argmax()), norms.shape[1])
        ratio = f"{float(norms[t, pair] * factor[t]):.4g} times the norm at position 0"
        messages.append(f"the norm at position {int(ids[t])} is {ratio}, expected {float(factor[t]):.4g}")
    return messages, measured[clear]


def _factors(x: Tensor, first: slice, second: slice) -> tuple[Tensor, Tensor, float]:
    """Factors of the pairs relative to position 0, (T, r/2), their rounding errors (r/2,), and the residual."""
    z = torch.complex(x[..., first], x[..., second])  # (H, T, r/2)
    norm = z[:, 0].abs().square().sum(0).clamp(min=1e-30).sqrt()  # (r/2,)
    rotations = (z * z[:, :1].conj()).sum(0) / norm**2
    noise = NOISE * x[:, 0].norm() / math.sqrt(x.shape[-1]) / norm
    left = (z - rotations * z[:, :1]).abs().square().sum(0).sqrt() / norm - noise
    return rotations, noise, float(left.max().clamp(min=0))


def _frequencies(rotations: Tensor, ids: Tensor) -> Tensor:
    """Radians per position (r/2,), refined at positions 1, 2, 4, …; a change by more than 0.5 radians is ignored."""
    found, where = torch.zeros(rotations.shape[1], dtype=torch.float64), {int(p): i for i, p in enumerate(ids)}
    for step in (1 << k for k in range(40) if 1 << k in where):
        change = torch.angle(rotations[where[step]] * torch.exp(-1j * step * found))
        found = found + torch.where((change.abs() > 0.5) & (step > 1), 0, change / step)
    return found
