"""Free cores, with a pretended clock and use of the cores."""

import os

import psutil
import pytest

from kerple.base import processor_cores
from kerple.base.processor_cores import cores, free_cores, measure_load


@pytest.mark.parametrize(
    ("percent", "own", "expected"),
    [
        ([0, 0, 0, 0], 0, 4),
        ([50, 50, 0, 0], 1, 4),  # used by this process and its ended children only
        ([100, 60, 0, 0], 1, 3),
        ([100, 100, 10, 0], 0, 2),
        ([100, 100, 100, 100], 1, 1),
        ([90, 30, 0, 0], 1, 4),
    ],
)
def test_free_cores_are_those_that_other_processes_do_not_use(percent, own, expected, monkeypatch) -> None:
    clock, used = 10.0, [1.0, 0.5, 3.0, 0.2]
    monkeypatch.setattr(processor_cores.time, "monotonic", lambda: clock)
    monkeypatch.setattr(os, "times", lambda: (*used, clock))
    monkeypatch.setattr(psutil, "cpu_percent", lambda percpu: [100.0, *percent, 100.0])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 3, 4}, raising=False)  # of six cores
    monkeypatch.setattr(processor_cores, "_start", None)
    assert free_cores() == cores() == 4
    measure_load()
    clock, used = clock + 2, [seconds + 2 * own / len(used) for seconds in used]
    assert free_cores() == expected
