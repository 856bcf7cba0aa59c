"""Schedules of the learning rate: a linear warm-up, then one of four shapes."""

import math
from typing import Literal

ScheduleName = Literal["cosine", "linear", "wsd", "constant"]


def lr_multiplier(step: int, name: ScheduleName, warmup: int, end: int, final: float, decay: float) -> float:
    """Return the learning rate at a step, as a fraction of its peak.

    The rate rises linearly from 1 / warmup to 1 in the first ``warmup`` steps. After these steps, ``cosine`` and
    ``linear`` decrease to ``final`` at ``end``. ``wsd`` (warm-up, stable, decay: Hu et al. 2024, arXiv 2404.06395)
    stays at 1, and decreases linearly to ``final`` in the last fraction ``decay`` of all steps. ``constant`` stays
    at 1.

    Args:
        step: Number of optimiser steps before this one.
        name: Name of the schedule.
        warmup: Number of steps in which the rate rises, at least 2.
        end: Step at which the rate has decreased to ``final``, larger than ``warmup``.
        final: Fraction of the peak at the end, in [0, 1].
        decay: Fraction of all steps in which ``wsd`` decreases, in (0, 1].
    """
    if step < warmup:
        return (1 + step) / warmup
    progress = min(1.0, (step - warmup) / (end - warmup))
    height = {
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "linear": 1 - progress,
        "wsd": min(1.0, max(0, end - step) / (decay * end)),
        "constant": 1.0,
    }[name]
    return final + (1 - final) * height
