"""Number of processor cores, and of those that other processes leave free."""

import os
import time
from importlib.util import find_spec

from kerple.base.errors import require

WORKERS_PER_CORE = 16  # more processes take minutes to start, and use up the memory
# set if `compare` has set OMP_NUM_THREADS, and not the user; a resumed run then keeps its earlier number of threads
CHOSEN = "KERPLE_CHOSE_THREADS"
_start: tuple[float, float] | None = None  # seconds on the clock and `_own_seconds`, when `measure_load` was called


def cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_workers(option: str, workers: int) -> None:
    """Raise a UserError if a number of processes is negative, or above `WORKERS_PER_CORE` for each core."""
    most = WORKERS_PER_CORE * cores()
    require(0 <= workers <= most, option, workers, f"0 to {most}, {WORKERS_PER_CORE} for each core")


def measure_load() -> None:
    """Start to measure how much other processes use the cores. A later call of `free_cores` ends the measurement."""
    global _start
    if find_spec("psutil") is None:  # the command reports that packages are missing
        return
    import psutil  # may be missing

    _start = time.monotonic(), _own_seconds()
    psutil.cpu_percent(percpu=True)  # the next call returns the averages since this one


def free_cores() -> int:
    """Return how many cores other processes have left free since `measure_load` was called, at least 1.

    Without this call, the number of cores is returned. The fraction of a core is rounded.
    """
    if _start is None:
        return cores()
    import psutil  # may be missing, but then the measurement has not started

    seconds, own = time.monotonic() - _start[0], _own_seconds() - _start[1]
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(cores())
    busy = sum(percent for core, percent in enumerate(psutil.cpu_percent(percpu=True)) if core in usable) / 100
    return min(cores(), max(1, round(cores() - busy + own / seconds)))


def _own_seconds() -> float:
    """Return the seconds of all cores that this process has used, with those of its ended child processes."""
    return sum(os.times()[:4])
