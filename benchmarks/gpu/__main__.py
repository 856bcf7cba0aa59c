"""Measurements on a GPU: ``python -m benchmarks.gpu [PREFIX ...]``, or ``make gpu``.

Each completed measurement is appended to OUT/rows.jsonl, and is not repeated. The same command continues an interrupted
run, which loses only the measurement in progress. ``--resume`` first copies the lines of an earlier run. ``--toy``
makes the measurements on the CPU at a toy size. OUT/report.md lists missing and failed measurements.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import timings, trainings
from benchmarks.measure import record
from kerple.base.processor_cores import cores

STRATEGIES = ("KerpleLog", "ALiBi", "RoPE", "T5", "NoPE")
GOALS = (  # description, (measurement, key of its result), the divisor in the same form, bound, if it is a lower bound
    ("table / no table, δ 64, T 2048", ("attention-64-2048", "table"), ("attention-64-2048", "no table"), 1.35, False),
    ("table / causal, δ 64, T 2048", ("attention-64-2048", "table"), ("attention-64-2048", "causal"), 2.5, False),
    ("mask / table, δ 64, T 2048", ("attention-64-2048", "mask"), ("attention-64-2048", "table"), 5, True),
    ("step time: KerpleLog / NoPE", ("step-KerpleLog", "milliseconds"), ("step-NoPE", "milliseconds"), 1.03, False),
    ("model FLOPs utilisation (MFU) of a step", ("step-KerpleLog", "MFU"), None, 0.4, True),
    ("memory of reading 16,384 tokens, MiB", ("evaluation-KerpleLog", "MiB"), None, 8192, False),
)


def parity(dtype: str, toy: bool, out: Path) -> dict[str, Any]:
    """Run tests marked ``gpu``, and return the number of passed tests and the names of failed tests.

    ``bf16`` and ``fp16`` run the 252 cases of this dtype against fp64. ``other`` runs all other tests.
    """
    selection = f"{dtype} and those_of_fp64" if dtype != "other" else "not those_of_fp64"
    if toy:
        selection = f"{selection} and 32-129" if dtype != "other" else "equal_in_every_bit or share_a_key_head"
    path = out / f"parity-{dtype}.xml"
    path.unlink(missing_ok=True)  # of a call that was stopped
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-m", "gpu", "-k", selection, f"--junit-xml={path}"]
    command += [f"-n{cores()}"]  # processes, because compilation on one processor core takes most of the time
    subprocess.run(
        [*command, "-p", "no:cacheprovider"], cwd=trainings.ROOT, env=os.environ | {"KERPLE_DRY": str(int(toy))}
    )
    suite = next(ET.parse(path).getroot().iter("testsuite"))
    path.unlink()
    total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = [case.get("name") for tag in ("failure", "error") for case in suite.iterfind(f"testcase[{tag}]")]
    if total == skipped:
        raise RuntimeError("every test was skipped")
    return {"passed": total - skipped - len(failed), "failed": failed}


def measurements(toy: bool, out: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return the measurements by name, the most important first."""
    size = timings.TOY if toy else timings.GPU
    lengths = sorted(size.lengths, key=lambda length: abs(length - 2048))  # first 2,048, the length of the goals
    calls: dict[str, Callable[[], dict[str, Any]]] = {"parity-other": partial(parity, "other", toy, out)}
    calls |= {f"attention-64-{length}": partial(timings.attention, size, 64, length) for length in lengths}
    calls["attention-documents"] = partial(timings.documents, size)
    calls |= {f"step-{name}": partial(timings.step, size, name) for name in ("KerpleLog", "NoPE", "RoPE", "ALiBi")}
    calls["step-KerpleLog-atomic"] = partial(timings.step_with_atomics, size, "KerpleLog")
    calls |= {f"evaluation-{name}": partial(timings.evaluation, size, name) for name in ("KerpleLog", "NoPE")}
    calls |= {f"trained-300-{name}": partial(trainings.train, 4 if toy else 300, name, toy) for name in STRATEGIES}
    calls |= {f"parity-{dtype}": partial(parity, dtype, toy, out) for dtype in ("bf16", "fp16")}
    calls |= {f"attention-128-{length}": partial(timings.attention, size, 128, length) for length in lengths}
    calls |= {
        f"ranking-{label.replace(' ', '-')}-{seed}": partial(trainings.rank, label, seed, toy, out)
        for label, seed in trainings.order()
    }
    if not toy:
        calls |= {f"trained-2000-{name}": partial(trainings.train, 2000, name, toy) for name in STRATEGIES}
    return calls


def read(paths: list[Path]) -> dict[str, dict[str, Any]]:
    """Return the last line of each measurement in these files, by name, if code, device and torch version are equal."""
    rows, here = {}, _origin(record())
    for line in (line for path in paths for line in path.read_text(errors="replace").splitlines()):
        try:
            row = json.loads(line)
            name, origin, _ = str(row["name"]), _origin(row), (row["error"], row["result"].items())
        except (ValueError, TypeError, LookupError, AttributeError):  # an incomplete line of a killed run
            continue
        if origin != here:
            print(f"{name}: measured with {origin}, but this run has {here}; it counts as missing")
            continue
        rows[name] = row
    return rows


def _origin(record: dict[str, Any]) -> str:
    """Return the code, device and torch version of a record."""
    machine = record["machine"]
    return f"code {record['code']}, {machine['gpu'] or 'the CPU'}, torch {machine['torch']}"


def report(rows: dict[str, dict[str, Any]], names: list[str]) -> str:
    """Return goals with verdicts, measurements, and a list of missing and failed measurements, in Markdown."""
    lines = ["| goal | value | bound | verdict |", "|---|---|---|---|"]
    for text, numerator, divisor, bound, is_lower in GOALS:
        values = [rows.get(part[0], {}).get("result", {}).get(part[1]) for part in (numerator, divisor) if part]
        limit = f"{'≥' if is_lower else '≤'} {bound:g}"
        if None in values:
            lines.append(f"| {text} | not measured | {limit} | |")
            continue
        value = values[0] / values[1] if len(values) == 2 else values[0]
        verdict = "met" if (value >= bound if is_lower else value <= bound) else "missed"
        verdict = verdict if rows[numerator[0]]["machine"]["gpu"] else "dry run"
        lines.append(f"| {text} | {value:.3g} | {limit} | {verdict} |")
    lines += ["", "| measurement | device | result |", "|---|---|---|"]
    missing = [f"- {name}: not run" for name in names if name not in rows]
    for name, row in ((name, rows[name]) for name in names if name in rows):
        result = {key: value for key, value in row["result"].items() if key != "kernels"}
        if result:
            device = row["machine"]["gpu"] or "the CPU"
            lines.append(f"| {name} | {device} | {json.dumps(result, ensure_ascii=False)} |")
        faults = {"error": row["error"]} | {key: value for key, value in result.items() if key.endswith("failed")}
        missing += [f"- {name}: {key}: {value}" for key, value in faults.items() if value]
    return "\n".join([*lines, "", "Missing and failed:", "", *(missing or ["Nothing."]), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prefixes", nargs="*", default=[""], help="beginnings of names, measured in this order")
    parser.add_argument("--toy", action="store_true", help="measure on the CPU at a toy size")
    parser.add_argument("--out", type=Path, help="folder for rows.jsonl and report.md")
    parser.add_argument("--resume", type=Path, action="append", default=[], help="rows.jsonl of an earlier run")
    parser.add_argument("--deadline", type=int, default=0, help="stop after this number of seconds; 0: no limit")
    options = parser.parse_args()
    start = time.monotonic()
    if options.toy:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        sys.exit("benchmarks.gpu: needs a CUDA device of compute capability 8.0 or higher; --toy measures on the CPU")
    out = (options.out or trainings.ROOT / "logs" / ("gpu-toy" if options.toy else "gpu") / "records").resolve()
    out.mkdir(parents=True, exist_ok=True)
    calls = measurements(options.toy, out)
    selected = dict.fromkeys(name for prefix in options.prefixes for name in calls if name.startswith(prefix))
    for prefix in options.prefixes:
        if not any(name.startswith(prefix) for name in calls):
            sys.exit(f"benchmarks.gpu: PREFIX: got {prefix}, expected the beginning of one of: {', '.join(calls)}")
    path = out / "rows.jsonl"
    path.touch()
    rows = read([path])
    for name, row in read(options.resume).items():
        if name not in rows:
            rows[name] = append(path, row)
    stop_by_signals(options.deadline)
    try:
        for name in selected:
            if name not in rows or rows[name]["error"]:
                print(f"== {name}", flush=True)
                rows[name] = append(path, measure(name, calls[name]))
                left = f", {options.deadline - time.monotonic() + start:.0f} s left" if options.deadline else ""
                print(f"{name}: {rows[name]['seconds']:.0f} s{left}", flush=True)
    finally:
        (out / "report.md").write_text(text := report(rows, list(calls)))
        print(text)


def stop_by_signals(deadline: int) -> None:
    """Raise SystemExit in this process at SIGTERM, SIGINT, and after ``deadline`` seconds; 0 for no deadline."""
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit("stopped by a signal or the deadline; the same command continues"))

    def repeat_ignored_exit(unraisable: Any) -> None:
        # Python ignores exceptions in destructors, and the compiled graphs of torch have destructors
        if isinstance(unraisable.exc_value, SystemExit):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
        else:
            sys.__unraisablehook__(unraisable)

    sys.unraisablehook = repeat_ignored_exit
    signal.alarm(deadline)


def measure(name: str, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the record of a measurement. An exception is stored in it, so that the next measurement can run."""
    start, result, error = time.monotonic(), {}, None
    try:
        result = call()
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
        print(f"{name}: {error}", file=sys.stderr)
    return {"name": name, "seconds": time.monotonic() - start, "error": error, "result": result, **record()}


def append(path: Path, row: dict[str, Any]) -> dict[str, Any]:
    """Append a record to a file, and return it."""
    with path.open("a") as file:
        file.write(f"\n{json.dumps(row)}\n")  # the file may end with an incomplete line
    return row


if __name__ == "__main__":
    try:
        main()
    except OSError as error:  # for instance a full disk
        sys.exit(f"benchmarks.gpu: {error}")
