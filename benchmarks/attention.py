"""Cost of the strategies by kinds of attention, up to 16,384 tokens: ``python -m benchmarks.attention``.

Processor time and peak memory of a training step, and of a forward pass over a long text, of the demo's network in fp32
on one thread. All strategies take turns in one process, and a ratio is the median over the rounds. With
``--before FOLDER``, a checkout of an older version, a second process takes turns with the first and runs the strategies
of that version. Each measurement is written to results/cost/attention.csv, and the table to results/cost/attention.md.
It needs Linux.
"""

import argparse
import ctypes
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.measure import machine
from benchmarks.models import build, training_step
from kerple.compare.table_markup import Cell, Table
from kerple.measure.protocols import full

ROOT = Path(__file__).parents[1]
TRAINED = 512  # training length
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("NoPE", "RoPE", "ALiBi", "T5", "KerpleLog", "PoPE", "FoX")},
    "LearnedRelativeBias, extent 64": ("LearnedRelativeBias", {"extent": 64}),
    "LearnedRelativeBias, extent 1,024": ("LearnedRelativeBias", {"extent": 1024}),
    "Shaw, clip 16": ("Shaw", {"clip": 16}),
    **{name: (name, {}) for name in ("KerpleWeight2", "KerpleBiasWeight", "FIRE", "StickBreaking")},
}
TASKS = {  # batch, length, whether it is a training step, and the number of rounds
    "step 4 × 512": (4, 512, True, 8),
    "step 1 × 2,048": (1, 2048, True, 6),
    "reading 4,096": (1, 4096, False, 5),
    "reading 16,384": (1, 16384, False, 2),
}


@cache
def task(label: str, name: str) -> Callable[[], None]:
    """Return a function that performs a task of `TASKS` with a strategy of `STRATEGIES`."""
    batch, length, trains, _ = TASKS[name]
    strategy, options = STRATEGIES[label]
    torch.manual_seed(0)
    model = build("demo", strategy, TRAINED, **options)
    if trains:
        return training_step(model, batch, length, bf16=False)
    tokens = torch.randint(2048, (batch, length + 1))

    def read() -> None:
        with torch.inference_mode():
            full(model.eval(), tokens, length)

    return read


def serve() -> None:
    """Answer each line ``label;task`` of the standard input with seconds of processor time and MiB of peak memory."""
    torch.set_num_threads(1)

    def high_water() -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024

    for line in sys.stdin:
        run = task(*line.strip().split(";"))
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak memory to the current memory
        memory, start = high_water(), time.process_time()
        run()
        print(time.process_time() - start, high_water() - memory, flush=True)


def measure(folders: dict[str, Path], labels: list[str], names: list[str]) -> pd.DataFrame:
    """Return the measurements of each round, with the columns code, strategy, task, round, seconds and memory_mib."""
    rows = []
    with ExitStack() as stack:
        servers = {}
        for code, folder in folders.items():
            paths = {"PYTHONPATH": f"{folder / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "benchmarks.attention", "--serve"]
            servers[code] = stack.enter_context(
                subprocess.Popen(
                    command, env=os.environ | paths, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
            )
        for name in names:
            for turn in range(-1 if TASKS[name][3] > 2 else 0, TASKS[name][3]):  # round -1 warms up
                for label in labels:
                    for code, server in servers.items():
                        assert server.stdin is not None
                        assert server.stdout is not None
                        print(f"{label};{name}", file=server.stdin, flush=True)
                        seconds, memory = map(float, server.stdout.readline().split())
                        rows.append((code, label, name, turn, seconds, memory))
            print(f"{name}: measured", file=sys.stderr, flush=True)
    measured = pd.DataFrame(rows, columns=["code", "strategy", "task", "round", "seconds", "memory_mib"])
    return measured[measured["round"] >= 0]


def table(measured: pd.DataFrame) -> Table:
    """Return the table of seconds, ratios to NoPE of the same version, and memory."""
    rows: dict[str, dict[str, Cell]] = {}
    for (code, name), group in measured.groupby(["code", "task"], sort=False):
        seconds = group.pivot(index="round", columns="strategy", values="seconds")
        memory = group.groupby("strategy")["memory_mib"].median()
        for label in group["strategy"].unique():
            ratio = (seconds[label] / seconds["NoPE"]).median()
            version = "" if measured["code"].nunique() == 1 else f", {code}"
            text = f"{ratio:.2f} ({seconds[label].median():.2f} s, {memory[label]:,.0f} MiB)"
            rows.setdefault(label + version, {})[str(name)] = Cell(text)
    host, rounds = machine(), measured.groupby("task")["round"].nunique()
    note = (
        f"Processor time divided by that of NoPE, median over {rounds.min()} to {rounds.max()} rounds, with the "
        f"seconds and the peak memory above the weights. A step is forward, backward, clipping and AdamW. Training "
        f"length {TRAINED}, fp32, 1 thread. {host['cpu']}, load {host['load']:.1f}, torch {host['torch']}."
    )
    return Table("Cost of attention", pd.DataFrame.from_dict(rows, orient="index").sort_index(), note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="checkout of an older version")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES, metavar="NAME")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS, metavar="TASK")
    parser.add_argument("--output", type=Path, default=ROOT / "results/cost", help="folder of attention.csv and .md")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve()
    folders = {"after": ROOT} | ({} if options.before is None else {"before": options.before.resolve()})
    measured = measure(folders, list(dict.fromkeys(["NoPE", *options.strategies])), options.tasks)
    costs = table(measured)
    measured.to_csv(options.output / "attention.csv", index=False, float_format="%.5g")
    (options.output / "attention.md").write_text(f"# attention\n\n{costs.markdown()}")
    print(costs.markdown())


if __name__ == "__main__":
    main()
