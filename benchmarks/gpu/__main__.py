"""What a GPU has to show: ``python -m benchmarks.gpu [PREFIX ...]``, or ``make gpu``.

Each measurement is a line of OUT/rows.jsonl as soon as it is made, and is not made again: an interrupted run goes on
with the same command, and loses what was being measured alone. ``--resume`` reads the lines of earlier runs first.
``--toy`` makes the same measurements on the CPU at a toy size. The report says what is missing.
"""

import argparse
import json
import os
import shutil
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

from benchmarks.gpu import pieces
from benchmarks.measure import record
from kerple.measure import results

ROOT = Path(__file__).parents[2]
STRATEGIES = ("KerpleLog", "ALiBi", "RoPE", "T5", "NoPE")
TOY = [  # sizes at which a CPU trains in seconds
    "--model.layers=2", "--model.dim=32", "--model.heads=2", "--model.compile=false", "--trainer.log_every_n_steps=1",
    "--data.length=32", "--data.batch_size=4", "--data.validation_segments=4", "--trainer.val_check_interval=4",
    "--trainer.accelerator=cpu", "--trainer.precision=32-true",
    '--trainer.callbacks=[{"class_path": "LastCheckpoint"}, {"class_path": "Throughput"}, '
    '{"class_path": "Extrapolation", "init_args": {"lengths": [32, 64, 128], "blocks": 2, "validation_blocks": 0}}]',
]  # fmt: skip
GOALS = (  # what, the measurement and its number, those that it is divided by, the bound, whether it is a lower one
    ("table / no table, δ 64, T 2048", ("attention-64-2048", "table"), ("attention-64-2048", "no table"), 1.35, False),
    ("table / causal, δ 64, T 2048", ("attention-64-2048", "table"), ("attention-64-2048", "causal"), 2.5, False),
    ("mask / table, δ 64, T 2048", ("attention-64-2048", "mask"), ("attention-64-2048", "table"), 5, True),
    ("a step: KerpleLog / NoPE", ("step-KerpleLog", "milliseconds"), ("step-NoPE", "milliseconds"), 1.03, False),
    ("a step: share of the chip's peak (MFU)", ("step-KerpleLog", "MFU"), None, 0.4, True),
    ("reading 16,384 tokens: MiB", ("evaluation-KerpleLog", "MiB"), None, 8192, False),
)


def parity(dtype: str, toy: bool, out: Path) -> dict[str, Any]:
    """The tests marked ``gpu``: 252 cases of one dtype, or (``other``) everything else. How many passed and failed."""
    chosen = f"{dtype} and those_of_fp64" if dtype != "other" else "not those_of_fp64"
    if toy:
        chosen = f"{chosen} and 32-129" if dtype != "other" else "equal_in_every_bit or share_a_key_head"
    path = out / f"parity-{dtype}.xml"
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-m", "gpu", "-k", chosen, f"--junit-xml={path}"]
    environment = os.environ | {"KERPLE_DRY": "1" if toy else "0"}
    subprocess.run([*command, "-p", "no:cacheprovider"], cwd=ROOT, env=environment)
    suite = next(ET.parse(path).getroot().iter("testsuite"))
    path.unlink()
    total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = [
        case.get("name") for case in suite.iter("testcase") if {child.tag for child in case} & {"failure", "error"}
    ]
    if total == skipped:
        raise RuntimeError("every test was skipped")
    return {"passed": total - skipped - len(failed), "failed": failed}


def trained(steps: int, name: str, toy: bool) -> dict[str, Any]:
    """Fit and test one strategy as `run.py compare` does, on the bundle's shards; perplexity by length.

    A fit that was cut off goes on from its last checkpoint.
    """
    code = str(record()["code"])  # a fit of other code is not continued
    folder = ROOT / "logs" / ("gpu-toy" if toy else "gpu") / code / f"{steps}-steps" / name
    last = folder / "checkpoints" / "last.ckpt"
    if not last.exists():  # cut off before its first checkpoint; another would go beside it
        shutil.rmtree(folder, ignore_errors=True)
    flags = ["--config=configs/gpu.yaml", f"--model.position={name}", f"--trainer.max_steps={steps}"]
    _command("fit", *flags, *(TOY if toy else []), f"--run_dir={folder}", "--ckpt_path=last")
    shutil.rmtree(folder / "test", ignore_errors=True)  # of a test that was cut off; another would go beside it
    _command("test", f"--ckpt_path={last}", f"--run_dir={folder / 'test'}")
    cost = json.loads((folder / "cost.json").read_text())
    cells = results.totals(results.read(folder / "test")[0]).query("metric == 'ppl' and protocol == 'full'")
    perplexity = dict(zip(cells["length"].tolist(), cells["value"].tolist(), strict=True))
    return {"perplexity": perplexity, **{name: cost[name] for name in ("tokens_per_second", "compilation_seconds")}}


def _command(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "run.py", *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.splitlines() or [f"run.py ended with {done.returncode}"])[-1])


def measurements(toy: bool, out: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    """By name, in the order in which they are worth a minute of a GPU."""
    size = pieces.TOY if toy else pieces.GPU
    lengths = sorted(size.lengths, key=lambda length: abs(length - 2048))  # the goals are at 2,048
    calls: dict[str, Callable[[], dict[str, Any]]] = {"parity-other": partial(parity, "other", toy, out)}
    for length in lengths:
        calls[f"attention-64-{length}"] = partial(pieces.attention, size, 64, length)
    for name in ("KerpleLog", "NoPE", "RoPE", "ALiBi"):
        calls[f"step-{name}"] = partial(pieces.step, size, name)
    for name in ("KerpleLog", "NoPE"):
        calls[f"evaluation-{name}"] = partial(pieces.evaluation, size, name)
    for name in STRATEGIES:
        calls[f"trained-300-{name}"] = partial(trained, 4 if toy else 300, name, toy)
    for dtype in ("bf16", "fp16"):
        calls[f"parity-{dtype}"] = partial(parity, dtype, toy, out)
    for length in lengths:
        calls[f"attention-128-{length}"] = partial(pieces.attention, size, 128, length)
    if not toy:
        for name in STRATEGIES:
            calls[f"trained-2000-{name}"] = partial(trained, 2000, name, toy)
    return calls


def read(paths: list[Path]) -> dict[str, dict[str, Any]]:
    """Earlier lines of this code and device by the name of their measurement; later ones win."""
    rows, here = {}, _origin(record())
    for line in (line for path in paths for line in path.read_text(errors="replace").splitlines()):
        try:
            row = json.loads(line)
            name, origin, _ = str(row["name"]), _origin(row), (row["error"], row["result"].items())
        except (ValueError, TypeError, LookupError, AttributeError):  # of a run that was cut off while it wrote
            continue
        if origin != here:
            print(f"{name}: was measured of other code or elsewhere ({origin}; here {here}): it counts as missing")
            continue
        rows[name] = row
    return rows


def _origin(record: dict[str, Any]) -> str:
    machine = record["machine"]
    return f"code {record['code']}, {machine['gpu'] or 'the CPU'}, torch {machine['torch']}"


def report(rows: dict[str, dict[str, Any]], names: list[str]) -> str:
    """Every goal with its verdict, every measurement, and what is missing, in Markdown."""
    lines = ["| goal | value | bound | verdict |", "|---|---|---|---|"]
    for text, over, under, bound, at_least in GOALS:
        values = [rows.get(where[0], {}).get("result", {}).get(where[1]) for where in (over, under) if where]
        limit = f"{'≥' if at_least else '≤'} {bound:g}"
        if None in values:
            lines.append(f"| {text} | not measured | {limit} | |")
            continue
        value = values[0] / values[1] if len(values) == 2 else values[0]
        verdict = "holds" if (value >= bound if at_least else value <= bound) else "misses"
        verdict = verdict if rows[over[0]]["machine"]["gpu"] else "dry run"
        lines.append(f"| {text} | {value:.3g} | {limit} | {verdict} |")
    lines += ["", "| measurement | on | result |", "|---|---|---|"]
    missing = [f"- {name}: not run" for name in names if name not in rows]
    for name, row in ((name, rows[name]) for name in names if name in rows):
        result = {key: value for key, value in row["result"].items() if key != "kernels"}
        if result:
            on = row["machine"]["gpu"] or "the CPU"
            lines.append(f"| {name} | {on} | {json.dumps(result, ensure_ascii=False)} |")
        faults = {"error": row["error"]} | {key: value for key, value in result.items() if key.endswith("failed")}
        missing += [f"- {name}: {key}: {value}" for key, value in faults.items() if value]
    return "\n".join([*lines, "", "Missing:", "", *(missing or ["Nothing."]), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prefixes", nargs="*", default=[""], help="of names: attention, step-NoPE; all without")
    parser.add_argument("--toy", action="store_true", help="on the CPU, at a toy size")
    parser.add_argument("--out", type=Path, help="folder of rows.jsonl and report.md")
    parser.add_argument("--resume", type=Path, action="append", default=[], help="rows.jsonl of an earlier run")
    parser.add_argument("--deadline", type=int, default=0, help="seconds after which to stop")
    options = parser.parse_args()
    if options.toy:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        sys.exit("benchmarks.gpu: there is no CUDA device of compute capability 8.0 here; --toy measures on the CPU")
    out = (options.out or ROOT / "logs" / ("gpu-toy" if options.toy else "gpu") / "records").resolve()
    out.mkdir(parents=True, exist_ok=True)
    calls = measurements(options.toy, out)
    for prefix in options.prefixes:
        if not any(name.startswith(prefix) for name in calls):
            sys.exit(f"benchmarks.gpu: got {prefix}, expected the beginning of one of: {', '.join(calls)}")
    path = out / "rows.jsonl"
    path.touch()
    rows = read([path])
    for name, row in read(options.resume).items():
        if name not in rows:
            rows[name] = kept(path, row)
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit("stopped, by a signal or the deadline; the same command goes on"))
    signal.alarm(options.deadline)
    try:
        for name, call in calls.items():
            if name.startswith(tuple(options.prefixes)) and (name not in rows or rows[name]["error"]):
                print(f"== {name}", flush=True)
                rows[name] = kept(path, measured(name, call))
    finally:
        (out / "report.md").write_text(text := report(rows, list(calls)))
        print(text)


def measured(name: str, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The line of a measurement, or of its error: one fault is no reason to lose the next measurement's minutes."""
    start, result, error = time.monotonic(), {}, None
    try:
        result = call()
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
        print(f"{name}: {error}", file=sys.stderr)
    seconds = time.monotonic() - start
    return {"name": name, "seconds": seconds, "error": error, "result": result, **record()}


def kept(path: Path, row: dict[str, Any]) -> dict[str, Any]:
    """Append a row to the records, and return it."""
    with path.open("a") as file:
        file.write(f"\n{json.dumps(row)}\n")  # half a line may stand before it
    return row


if __name__ == "__main__":
    try:
        main()
    except OSError as error:  # a disk that is full, or a folder that cannot be written to
        sys.exit(f"benchmarks.gpu: {error}")
