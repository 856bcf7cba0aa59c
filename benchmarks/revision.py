"""One training step of the demo's model, here beside an older revision: ``python -m benchmarks.revision 064a975``.

The older revision is checked out beside this one for as long as it takes. A process of each makes a step in turn, so
that a slow moment of the machine hits both.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.measure import Row, publish

ROOT = Path(__file__).parents[1]
STRATEGIES = ("NoPE", "KerpleLog", "RoPE", "Sinusoidal", "FoX", "KerpleWeight2", "Shaw", "TransformerXL")
STEPPER = """
import sys, time
import torch
from kerple.model import Transformer
from kerple.positions import Shape, build

name, batch, length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
network = Transformer(
    Shape(128, 4, length), 4, 2048, lambda s: build(name, dim=s.dim, heads=s.heads, length=s.length), init=0.125
).train()
optimiser = torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True)
tokens = torch.randint(0, 512, (batch, length + 1))
for _ in sys.stdin:
    start = time.perf_counter()
    network.losses(tokens).mean().backward()
    optimiser.step()
    network.constrain_()
    optimiser.zero_grad()
    print(time.perf_counter() - start, flush=True)
"""


def stepper(source: Path, name: str, batch: int, length: int) -> subprocess.Popen[str]:
    """A process that makes one step for each line it is sent, and says how many seconds it took."""
    return subprocess.Popen(
        [sys.executable, "-c", STEPPER, name, str(batch), str(length)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(source / "src")},
    )


def ratio(old: Path, name: str, batch: int, length: int, repeats: int) -> tuple[float, dict[str, float]]:
    """Median of new / old over steps made in turn, and the median seconds of both."""
    times: dict[str, list[float]] = {"old": [], "new": []}
    with ExitStack() as stack:
        both = {
            which: stack.enter_context(stepper(source, name, batch, length))
            for which, source in (("old", old), ("new", ROOT))
        }
        for turn in range(-3, repeats):
            for which, process in both.items():
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write("\n")
                process.stdin.flush()
                seconds = float(process.stdout.readline())
                if turn >= 0:
                    times[which].append(seconds)
        for process in both.values():
            assert process.stdin is not None
            process.stdin.close()
    each = [new / old for old, new in zip(times["old"], times["new"], strict=True)]
    return statistics.median(each), {which: statistics.median(t) for which, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision", nargs="?", default="064a975")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--strategies", nargs="*", default=STRATEGIES)
    given = parser.parse_args()
    rows, details = [], {}
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder) / "old"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", str(old), given.revision], check=True, capture_output=True)
        try:
            for name in given.strategies:
                for batch, length in ((32, 64), (4, 512)):
                    found, times = ratio(old, name, batch, length, given.repeats)
                    what = f"{name}, {batch} × {length}: now / {given.revision}"
                    detail = ", ".join(f"{which} {1000 * seconds:.0f} ms" for which, seconds in times.items())
                    rows.append(Row(what, found, 1.05, detail=detail))
                    details[what] = times
        finally:
            subprocess.run([*git, "remove", "--force", str(old)], check=True, capture_output=True)
    publish("revision", rows, details)


if __name__ == "__main__":
    main()
