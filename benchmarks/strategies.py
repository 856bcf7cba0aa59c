"""A training step of the demo's model with a strategy, beside one without positions and one of an older revision.

``python -m benchmarks.strategies [--revision 064a975]`` checks the older revision out beside this one for as long as it
takes. Each of the three is a process of its own, and they make steps in turn: a ratio is the median over steps that
followed each other, so that a slow moment of the machine hits both sides. What is counted is processor time on one
thread, which others on the machine lengthen far less than the time of day.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.measure import Row, publish

ROOT = Path(__file__).parents[1]
SHORT, LONG = (32, 64), (4, 512)  # batch × length: what the demo trains on, and eight times its length
GOALS = {"StickBreaking": 3.0, "PoPE": 3.0, "DAPE": 8.0, "PaTH": 8.0}  # of NoPE's step, at the longer length
KNOWN = ("NoPE", "KerpleLog", "RoPE", "Sinusoidal", "FoX", "KerpleWeight2", "Shaw", "TransformerXL")  # by the older one
SLOWER = 1.05  # than the older revision, at most
STEPPER = """
import sys, time
import torch
from kerple.model import Transformer
from kerple.positions import Shape, build

name, batch, length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
torch.set_num_threads(1)
network = Transformer(
    Shape(128, 4, length), 4, 2048, lambda s: build(name, dim=s.dim, heads=s.heads, length=s.length), init=0.125
).train()
optimiser = torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True)
tokens = torch.randint(0, 512, (batch, length + 1))
for _ in sys.stdin:
    start = time.process_time()
    network.losses(tokens).mean().backward()
    optimiser.step()
    network.constrain_()
    optimiser.zero_grad()
    print(time.process_time() - start, flush=True)
"""


@contextmanager
def stepper(source: Path, name: str, batch: int, length: int) -> Iterator[subprocess.Popen[str]]:
    """A process that makes one step for each line it is sent, and says how many seconds of a processor it took."""
    environment = {**os.environ, "PYTHONPATH": str(source / "src")}
    command = [sys.executable, "-c", STEPPER, name, str(batch), str(length)]
    with subprocess.Popen(
        command, text=True, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            yield process
        finally:
            process.communicate()


def step(process: subprocess.Popen[str]) -> float:
    """Seconds of one more step."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def in_turn(of: dict[str, tuple[Path, str]], batch: int, length: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of the steps of each, by its label: a folder with the package, and a strategy."""
    times: dict[str, list[float]] = {label: [] for label in of}
    with ExitStack() as stack:
        processes = {k: stack.enter_context(stepper(*source, batch, length)) for k, source in of.items()}
        for turn in range(-3, repeats):  # three to warm up
            for label, process in processes.items():
                seconds = step(process)
                if turn >= 0:
                    times[label].append(seconds)
    return times


def rows(name: str, old: Path | None, revision: str, repeats: int) -> Iterator[tuple[Row, dict[str, float]]]:
    """The ratios of one strategy, each with median seconds."""
    for batch, length in (SHORT, LONG):
        beside: dict[str, tuple[Path, str]] = {}
        limits: dict[str, float] = {}
        if old is not None and name in KNOWN:
            beside[revision], limits[revision] = (old, name), SLOWER
        if name in GOALS and (batch, length) == LONG:
            beside["NoPE"], limits["NoPE"] = (ROOT, "NoPE"), GOALS[name]
        times = in_turn({"now": (ROOT, name), **beside}, batch, length, repeats) if beside else {}
        seconds = {label: statistics.median(t) for label, t in times.items()}
        detail = ", ".join(f"{label} {1000 * s:.0f} ms" for label, s in seconds.items())
        for label, limit in limits.items():
            ratio = statistics.median(a / b for a, b in zip(times["now"], times[label], strict=True))
            yield Row(f"{name}, {batch} × {length}: now / {label}", ratio, limit, detail=detail), seconds


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """A work tree of a revision, for as long as it is needed."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "old"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", str(place), revision], check=True, capture_output=True)
        try:
            yield place
        finally:
            subprocess.run([*git, "remove", "--force", str(place)], check=True, capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--revision", default="064a975", help="the older one; an empty word for none")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--strategies", nargs="*", default=[*GOALS, *KNOWN])
    given = parser.parse_args()
    found = []
    with ExitStack() as stack:
        old = stack.enter_context(checked_out(given.revision)) if given.revision else None
        for name in given.strategies:
            for row, seconds in rows(name, old, given.revision, given.repeats):
                print(f"{row.name}  {row.value:.3f}  {row.detail}", flush=True)
                found.append((row, seconds))
    publish("strategies", [row for row, _ in found], {"seconds": {row.name: seconds for row, seconds in found}})


if __name__ == "__main__":
    main()
