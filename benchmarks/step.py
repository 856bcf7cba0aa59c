"""One training step, KERPLE-log beside no position and beside an explicit T × T bias: ``python -m benchmarks.step``.

On a GPU, also every strategy at the paper's size, compiled: tokens per second and share of the chip's peak.
"""

import argparse
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import kerple.model.self_attention
from benchmarks.attention import explicit
from benchmarks.measure import Row, medians, publish
from benchmarks.models import beside_nope, build, compiled_step, training_step
from kerple.model.cost import CHIPS, flops
from kerple.positions import names

PAPER = ((32, 512), (8, 2048), (4, 4096))  # batch × length
TARGETS = {512: 1.03, 4096: 1.08}  # KerpleLog / NoPE on a GPU


def with_explicit_bias(step: Callable[[], None]) -> Callable[[], None]:
    """The same step with a mask of T × T per head that needs a gradient, through torch's attention."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *, table: Tensor, **_: object) -> Tensor:
        return explicit(q, k, v, table)

    def run() -> None:
        with mock.patch.object(kerple.model.self_attention, "attend", attend):
            step()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    demo = {name: training_step(build("demo", name, 64, device), 128, 64) for name in ("KerpleLog", "NoPE")}
    times = medians(demo, repeats)
    rows = [Row("demo model, 128 × 64: KerpleLog / NoPE", times["KerpleLog"] / times["NoPE"], 1.05, detail=text(times))]
    details: dict[str, object] = {"demo 128 × 64, seconds": times}

    long = training_step(build("demo", "KerpleLog", 2048, device), 2, 2048)
    times = medians({"explicit bias": with_explicit_bias(long), "table": long}, min(repeats, 7))
    ratio = times["explicit bias"] / times["table"]
    rows.append(Row("demo model, 2 × 2048: explicit bias / table", ratio, 2.5, at_least=True, detail=text(times)))
    details["demo 2 × 2048, seconds"] = times

    for batch, length in PAPER:
        name = f"162M, compiled, {batch} × {length}"
        if device == "cpu":
            rows += [Row(f"{name}: KerpleLog / NoPE", None, TARGETS[length])] if length in TARGETS else []
            continue
        speeds = {strategy: tokens_per_second(strategy, batch, length, repeats) for strategy in names()}
        details[name] = speeds
        if length in TARGETS:
            ratio = beside_nope("162M", batch, length, device, repeats)
            rows.append(Row(f"{name}: KerpleLog / NoPE", ratio, TARGETS[length]))
        if length == 512:
            used = speeds["KerpleLog"]["share of peak"]
            rows.append(Row(f"{name}: share of the chip's peak (MFU)", used, 0.4, unit="", at_least=True))
    publish("step", rows, details)


def tokens_per_second(strategy: str, batch: int, length: int, repeats: int) -> dict[str, Any]:
    """Speed of a compiled step at the paper's size, and its share of the GPU's peak, where that is known."""
    network, step = compiled_step("162M", strategy, batch, length, "cuda")
    speed = batch * length / medians({"step": step}, repeats)["step"]
    chip = next((chip for chip in CHIPS if chip.name in torch.cuda.get_device_name()), None)
    used = speed * flops(network, length).training
    return {"tokens per second": speed, "share of peak": used / chip.flops if chip else None}


def text(times: dict[str, float]) -> str:
    return ", ".join(f"{name} {1e3 * t:.0f} ms" for name, t in times.items())


if __name__ == "__main__":
    main()
