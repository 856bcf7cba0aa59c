"""Interleaved timings, memory above a baseline, and the machine's description for a record."""

import hashlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import torch

from kerple.base.resources import cores

RECORDS = Path(__file__).parent / "records"


def in_turn(runs: Mapping[str, Callable[[], object]], repeats: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Seconds of each repeat of each run. The runs take turns, so that a slow moment of the machine affects all."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(-warm_up, repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


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
    """Description of the machine, on which timings depend."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return {
        "cpu": fields.get("model name", platform.processor()),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "vectors": [flag for flag in ("avx2", "avx512f", "amx_bf16") if flag in fields.get("flags", "").split()],
        "load": os.getloadavg()[0],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def record() -> dict[str, object]:
    """The first entries of a record: time, digest of the code, and machine."""
    root = Path(__file__).parents[1]  # a checksum, because a copy of the files has no commit
    folders = ("src", "benchmarks", "configs", "tests/gpu")
    files = sorted(path for folder in folders for end in ("py", "yaml") for path in (root / folder).rglob(f"*.{end}"))
    code = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]
    return {"when": datetime.now(UTC).isoformat(timespec="seconds"), "code": code, "machine": machine()}
