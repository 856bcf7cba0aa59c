"""Measurement of the rotation of queries or keys that differ only by their positions; comparison with a configuration.

Below, H is the number of heads, T the number of tokens, δ the head dimension, and r the number of rotated channels.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kerple.positions.angles import frequencies
from kerple.probe.configured_positions import Layer

ANGLE = 2e-3  # largest accepted error of an angle in radians, in addition to rounding
RATIO = 2e-3  # largest accepted relative error of a norm
ROUNDING = 4e-7  # largest relative rounding error of an angle; frequency, position and their product are fp32
NOISE = 2e-5  # assumed error of an entry of a query, relative to the root mean square of the query's entries


@dataclass
class Rotation:
    """The measured rotation of queries or keys. Pairs whose values are too close to 0 are left out.

    Args:
        radians: Radians per position of each pair of channels, (pairs,).
        expected: The same according to the configuration, (pairs,).
        positions: The positions, (T,) int64.
        errors: Largest error of the angle of a pair at each position in radians, (T,).
    """

    radians: Tensor
    expected: Tensor
    positions: Tensor
    errors: Tensor


def rotation_differences(x: Tensor, what: str, rows: Tensor, ids: Tensor, layer: Layer) -> tuple[list[str], Rotation]:
    """Compare the rotation of queries or keys with the configuration of their layer.

    Args:
        x: Queries or keys (H, T, δ) for a text that repeats a single token.
        what: ``queries``, which may be multiplied by a factor (`Layer.query_factor`), or ``keys``.
        rows: Indices of the tokens in the input, (T,) int64.
        ids: Positions of the tokens, (T,) int64; the first is 0.
        layer: The configuration of the layer.

    Returns:
        Messages about differences, and the measured rotation.
    """
    x = x.double().cpu()
    rope = None if layer.rope is None else layer.rope.frequencies
    half = (x.shape[-1] if rope is None else rope.dim) // 2  # number of rotated pairs, r/2
    expected = torch.zeros(half, dtype=x.dtype) if rope is None else rope(ids.amax(-1, keepdim=True)).flatten().cpu()
    factor = layer.query_factor(rows, ids) if what == "queries" else torch.ones(len(ids), dtype=x.dtype)
    angles = ids[:, None] * expected  # (T, r/2)
    # Channel i is paired with i + r/2, or with its neighbour; the pairing with the smaller residual is used. A single
    # head has no residual with either pairing. In this case, the pairing with the smaller error of the angles is used.
    layouts = ((slice(half), slice(half, 2 * half)), (slice(0, 2 * half, 2), slice(1, 2 * half, 2)))
    fits = [_factors(x, *channels) for channels in layouts]
    errors = [torch.angle(rotations * torch.exp(-1j * angles)).abs() for rotations, *_ in fits]
    best = min((0, 1), key=lambda i: (max(fits[i][2], RATIO), float(errors[i].sum())))
    (rotations, noise, residual), error = fits[best], errors[best]
    measurable = noise < 0.01  # (r/2,)
    measured = _frequencies(rotations, ids)
    largest = error[:, measurable].amax(1) if bool(measurable.any()) else error.new_zeros(len(ids))
    rotation = Rotation(measured[measurable], expected[measurable], ids, largest)
    if residual > RATIO:
        found = f"{residual:.1%} of the norm of a pair is unexplained, expected at most {RATIO:.1%}"
        return [f"positions do not only rotate pairs of channels: {found}"], rotation
    messages = []
    wrong = error > ANGLE + ROUNDING * angles + noise
    if bool(wrong.any()):
        pair = int(error.amax(0).argmax())
        hint = ""
        if rope is not None and rope.scaling is not None:
            unscaled = frequencies(rope.dim, rope.base, ids.device)
            is_unscaled = (measured - unscaled).abs() < 1e-3 * unscaled + ANGLE / int(ids.max())
            hint = f"; these are the frequencies without {rope.scaling}" if bool(is_unscaled[measurable].all()) else ""
        messages.append(
            f"pair {pair} rotates by {float(measured[pair]):.4g} radians per position, expected "
            f"{float(expected[pair]):.4g}; angles are wrong from position {int(ids[wrong.any(1)][0])} on, by up to "
            f"{float(error.max()):.2g} radians{hint}"
        )
    rest = x[..., 2 * half :]  # channels that are not rotated, and their scale relative to position 0
    scale = (rest * rest[:, :1]).sum((0, 2)) / rest[:, 0].square().sum().clamp(min=1e-30)  # (T,)
    norms = torch.cat([rotations.abs(), scale[:, None][:, : rest.shape[-1]]], 1) / factor[:, None]
    error = (norms - 1).abs() - torch.nn.functional.pad(noise, (0, norms.shape[1] - half))
    if float(error.max()) > RATIO:
        t, pair = divmod(int(error.argmax()), norms.shape[1])
        ratio = f"{float(norms[t, pair] * factor[t]):.4g} times the norm at position 0"
        messages.append(f"the norm at position {int(ids[t])} is {ratio}, expected {float(factor[t]):.4g}")
    return messages, rotation


def _factors(x: Tensor, first: slice, second: slice) -> tuple[Tensor, Tensor, float]:
    """Fit the effect of positions on pairs of channels by a complex factor for each position and pair.

    Args:
        x: Queries or keys (H, T, δ).
        first: First channels of the pairs, the real parts.
        second: Second channels of the pairs, the imaginary parts.

    Returns:
        The factors relative to position 0, (T, r/2) complex; their rounding errors, (r/2,); and the residual. The
        residual of a pair is the norm of the part that the factors do not explain, divided by the pair's norm at
        position 0, minus the rounding error. The returned residual is the largest over all pairs and positions.
    """
    z = torch.complex(x[..., first], x[..., second])  # (H, T, r/2)
    norm = z[:, 0].abs().square().sum(0).clamp(min=1e-30).sqrt()  # (r/2,)
    rotations = (z * z[:, :1].conj()).sum(0) / norm**2
    noise = NOISE * x[:, 0].norm() / math.sqrt(x.shape[-1]) / norm
    residual = (z - rotations * z[:, :1]).abs().square().sum(0).sqrt() / norm - noise
    return rotations, noise, float(residual.max().clamp(min=0))


def _frequencies(rotations: Tensor, ids: Tensor) -> Tensor:
    """Return the radians per position of each pair, (r/2,), from the factors of `_factors`.

    An estimate at position 1 is refined at positions 2, 4, 8, … of ``ids``. If a pair's angle at one of these positions
    differs from the estimate by more than 0.5 radians, the position is ignored for this pair.
    """
    estimate = torch.zeros(rotations.shape[1], dtype=torch.float64)
    index = {int(p): i for i, p in enumerate(ids)}
    for step in (1 << k for k in range(40) if 1 << k in index):
        change = torch.angle(rotations[index[step]] * torch.exp(-1j * step * estimate))
        estimate = estimate + torch.where((change.abs() > 0.5) & (step > 1), 0, change / step)
    return estimate
