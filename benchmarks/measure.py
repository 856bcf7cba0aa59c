"""Interleaved medians, memory above a baseline, the machine's description, verdicts and records."""

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from kerple.base.cluster import cores

RECORDS = Path(__file__).parent / "records"
REPEATS = 9


@dataclass(frozen=True)
class Row:
    """One line of a table: ``value`` should lie on the right side of ``limit``; value None is "not measured"."""

    name: str
    value: float | None
    limit: float
    unit: str = "×"
    at_least: bool = False
    detail: str = ""

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        return "holds" if (self.value >= self.limit if self.at_least else self.value <= self.limit) else "misses"


def medians(ways: Mapping[str, Callable[[], object]], repeats: int = REPEATS, warm_up: int = 2) -> dict[str, float]:
    """Median seconds of each way, run `in_turn`."""
    return {name: statistics.median(t) for name, t in in_turn(ways, repeats, warm_up).items()}


def in_turn(ways: Mapping[str, Callable[[], object]], repeats: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Seconds of each repeat of each way; one run of each in turn, so that a slow moment of the machine hits all."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-warm_up, repeats):
        for name, way in ways.items():
            synchronise()
            start = time.perf_counter()
            way()
            synchronise()
            if turn >= 0:
                times[name].append(time.perf_counter() - start)
    return times


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_above(script: str) -> float:
    """MiB by which a script's highest memory rises while it runs ``measured()``, in a fresh process.

    The script defines ``measured`` and allocates what is not to be counted before it ends; what it has freed again by
    then (a file that was read, a model that was translated) does not hide what ``measured`` needs.
    """
    # Linux: memory that was freed goes back to the system, then the highest is what there is now
    forget = "import ctypes, gc; gc.collect(); ctypes.CDLL(None).malloc_trim(0)"
    forget += "\nopen('/proc/self/clear_refs', 'w').write('5')"
    high_water = "int(next(x for x in open('/proc/self/status') if x.startswith('VmHWM')).split()[1])"
    # not ru_maxrss: it starts at what the parent held
    probe = f"{script}\n{forget}\nbefore = {high_water}\nmeasured()\nprint(({high_water} - before) / 1024)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def machine() -> dict[str, object]:
    """What the figures depend on."""
    cpu = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    flags = next((line.split() for line in _lines("/proc/cpuinfo") if line.startswith("flags")), [])
    return {
        "cpu": cpu,
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "amx": "amx_bf16" in flags,
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none: CUDA figures were not measured",
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def publish(name: str, rows: list[Row], details: Mapping[str, object]) -> None:
    """Print the rows with their verdicts and write ``records/<name>-<device>.json``."""
    width = max(len(row.name) for row in rows)
    for row in rows:
        value = "—" if row.value is None else f"{row.value:.3g}{'' if row.unit == '×' else ' ' + row.unit}"
        bound = f"{'>=' if row.at_least else '<='} {row.limit:g}"
        print(f"{row.name:{width}}  {value:>10}  {bound:>8}  {row.verdict:12}  {row.detail}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "rows": [asdict(row) | {"verdict": row.verdict} for row in rows],
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        **details,
    }
    RECORDS.mkdir(exist_ok=True)
    (RECORDS / f"{name}-{device}.json").write_text(json.dumps(record, indent=2) + "\n")
