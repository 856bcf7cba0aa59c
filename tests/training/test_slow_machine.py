"""Lines about a slow machine, with a pretended clock and load."""

from types import SimpleNamespace

import pytest
import torch

from kerple.training import slow_machine
from kerple.training.slow_machine import SlowMachine

USUAL, HALF = 1.0, 2.5  # seconds per step


@pytest.mark.parametrize(
    ("seconds", "loads", "expected"),
    [
        ([USUAL] * 300, [3.0], []),  # on two cores
        ([USUAL] * 300, [3.1], [1]),
        ([USUAL] * 9000, [3.1], [1, 3601, 7201]),
        # the first steps are slow, and the median is that of steps 10 to 50
        ([10.0] * 9 + [USUAL] * 41 + [HALF] * 40, [0.0], [50 + 1 + 24]),
        ([USUAL] * 50 + [1.9] * 200, [0.0], []),
        ([USUAL] * 50 + ([HALF] * 24 + [USUAL]) * 9, [0.0], []),
        ([USUAL] * 50 + [100.0, USUAL] * 9, [0.0], []),  # validations
        ([USUAL] * 50 + [100.0] * 60, [0.0], [52, 88]),  # an hour later, 36 steps
        ([USUAL] * 50 + [HALF] * 100, [0.0] * 60 + [9.0] * 90, [61]),  # the load first, and then nothing for an hour
    ],
)
def test_a_slow_machine_is_mentioned_once_an_hour(seconds, loads, expected, monkeypatch, capsys) -> None:
    now, step = 50.0, 0  # soon after the start of the machine
    monkeypatch.setattr(slow_machine.time, "monotonic", lambda: now)
    monkeypatch.setattr(slow_machine.os, "getloadavg", lambda: (loads[min(step, len(loads)) - 1], 0.0, 0.0))
    monkeypatch.setattr(slow_machine.os, "cpu_count", lambda: 2)
    trainer, batch = SimpleNamespace(global_step=7, world_size=1), {"tokens": torch.zeros(2, 5)}
    callback, lines = SlowMachine(), []
    callback.on_train_start(trainer, None)
    for step, duration in enumerate(seconds, 1):
        for last in (False, True):  # two micro-batches a step
            now += duration / 2
            trainer.global_step += last
            callback.on_train_batch_end(trainer, None, None, batch, 0)
            lines += [(step, line) for line in capsys.readouterr().out.splitlines()] if step % 50 == 0 or last else []
    assert [step for step, _ in lines] == expected
    assert all("load" in line or "less than half of the 16 " in line for _, line in lines)
