"""Timings of functions that take turns, the memory of a function, and a description of the machine."""

import hashlib
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread

import torch

from kerple.base.processor_cores import cores

RECORDS = Path(__file__).parent / "records"


def in_turn(
    runs: Mapping[str, Callable[[], object]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Return the seconds of each repetition of each function, by its name, on a clock such as `time.process_time`.

    The functions take turns, so that a slow moment of the machine affects all of them. Two earlier repetitions of each
    function are not timed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(-2, repeats):
        for name, run in runs.items():
            start = clock()
            run()
            if turn >= 0:
                seconds[name].append(clock() - start)
    return seconds


def in_processes(builders: Mapping[str, Callable[[], Callable[[], object]]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of processor time of each repetition of each function, by its name.

    Each function runs in a process with one thread. The processes take turns. Two earlier repetitions of each function
    are not timed.

    Args:
        builders: For each name, a function that builds the timed function in its process. It must be picklable.
        repeats: Number of timed repetitions.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # of the worker processes
    with ExitStack() as stack:
        spawn = get_context("spawn")
        processes = {
            name: stack.enter_context(ProcessPoolExecutor(1, spawn, _build, (builder,)))
            for name, builder in builders.items()
        }
        turns = [[p.submit(_processor_seconds).result() for p in processes.values()] for _ in range(repeats + 2)]
    return dict(zip(processes, map(list, zip(*turns[2:], strict=True)), strict=True))


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Return the median and the lower and upper quartile of the ratios of two functions' seconds, ours / theirs."""
    ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return middle, low, high


call: Callable[[], object]  # the function that a process of `in_processes` times


def _build(builder: Callable[[], Callable[[], object]]) -> None:
    global call
    Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    call = builder()


def _end_with_parent() -> None:
    """Wait until the parent process has ended, for example because it was killed, and end this process."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _processor_seconds() -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def peak_above(script: str) -> float:
    """Return the peak memory of the function ``measured``, in MiB, in a new process. It needs Linux.

    Args:
        script: Code that defines ``measured``. Memory that it holds at its end is not counted. Memory that it has freed
            by then does not change the result.
    """
    # returns freed memory to the system, and resets the peak memory of the process to its current memory
    forget = "import ctypes, gc; gc.collect(); ctypes.CDLL(None).malloc_trim(0)"
    forget += "\nopen('/proc/self/clear_refs', 'w').write('5')"
    high_water = "int(next(x for x in open('/proc/self/status') if x.startswith('VmHWM')).split()[1])"
    # ru_maxrss cannot be used, because it starts at the peak memory of the parent process
    probe = f"{script}\n{forget}\nbefore = {high_water}\nmeasured()\nprint(({high_water} - before) / 1024)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def machine() -> dict[str, object]:
    """Return a description of the machine, on which timings depend."""
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
    """Return the first entries of a record: time, digest of the code, and machine."""
    root = Path(__file__).parents[1]  # the digest of this folder, because a copy of the files has no commit
    folders = ("src", "benchmarks", "configs", "tests/gpu")
    files = sorted(path for folder in folders for end in ("py", "yaml") for path in (root / folder).rglob(f"*.{end}"))
    code = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]
    return {"when": datetime.now(UTC).isoformat(timespec="seconds"), "code": code, "machine": machine()}
