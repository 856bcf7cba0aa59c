"""What a GPU has to show, in pieces of at most ten minutes: ``python -m benchmarks.gpu [PIECE ...]``, or ``make gpu``.

A piece whose record is there is not run again, so an interrupted run goes on with the same command; ``--again`` does it
anew. ``--toy`` runs the same pieces on the CPU at a toy size. The report tells what is missing.
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
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import pieces
from benchmarks.measure import RECORDS, Row, machine

ROOT = Path(__file__).parents[2]
LIMIT = 600  # seconds of a piece
STRATEGIES = ("KerpleLog", "ALiBi", "RoPE", "T5", "NoPE")
TOY = [  # sizes at which a CPU trains in seconds
    "--model.layers=2", "--model.dim=32", "--model.heads=2", "--model.compile=false", "--data.corpus=stdlib",
    "--data.vocabulary=512", "--data.length=32", "--data.batch_size=4", "--data.validation_segments=4",
    "--trainer.accelerator=cpu", "--trainer.precision=32-true", "--trainer.val_check_interval=4",
    "--trainer.log_every_n_steps=1",
    '--trainer.callbacks=[{"class_path": "LastCheckpoint"}, {"class_path": "Throughput"}, '
    '{"class_path": "Extrapolation", "init_args": {"lengths": [32, 64, 128], "blocks": 2, "validation_blocks": 0}}]',
]  # fmt: skip
Found = tuple[list[Row], dict[str, Any]]


def parity(dtype: str, toy: bool, out: Path) -> Found:
    """The tests marked ``gpu``: 252 cases of one dtype, or (``other``) everything else."""
    chosen = f"{dtype} and those_of_fp64" if dtype != "other" else "not those_of_fp64"
    if toy:
        chosen = f"{chosen} and 32-129" if dtype != "other" else "fallback or tiny or inference or bit or few"
    path = out / f"parity-{dtype}.xml"
    environment = {**os.environ, "KERPLE_DRY": "1" if toy else "0"}
    spread = ["-n", "8"] if not toy and dtype != "other" and _there("xdist") else []
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-m", "gpu", "-k", chosen, f"--junit-xml={path}"]
    subprocess.run([*command, *spread, "-p", "no:cacheprovider"], cwd=ROOT, env=environment)
    suite = next(ET.parse(path).getroot().iter("testsuite"))
    count = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    failed = [case.get("name") for case in suite.iter("testcase") if case.find("failure") is not None]
    path.unlink()
    passed = count["tests"] - count["failures"] - count["errors"] - count["skipped"]
    rows = [
        Row(f"tests of {dtype} that fail", count["tests"] - count["skipped"] - passed, 0, unit=""),
        Row(f"tests of {dtype} that pass", passed, 1, unit="", at_least=True),  # none, where all were skipped
    ]
    return rows, {
        "passed": passed,
        **count,
        "failed": failed,
    }


def trained(steps: int, name: str, toy: bool, again: bool, out: Path) -> Found:
    """Fit and test one strategy as `run.py compare` does, on the largest built-in corpus; perplexity by length."""
    which = "gpu-toy" if toy else "gpu"
    folder = ROOT / "logs" / which / f"{steps}-steps" / name
    if again:
        shutil.rmtree(folder, ignore_errors=True)
    flags = ["--config=configs/gpu.yaml", f"--model.position={name}", f"--trainer.max_steps={steps}"]
    flags += TOY if toy else []
    _command(["fit", *flags, f"--run_dir={folder}", "--ckpt_path=last"])
    shutil.rmtree(folder / "test", ignore_errors=True)  # of a test that was cut off; another would go beside it
    _command(["test", f"--ckpt_path={folder / 'checkpoints' / 'last.ckpt'}", f"--run_dir={folder / 'test'}"])
    result = json.loads((folder / "test" / "extrapolation.json").read_text())
    cost = json.loads((folder / "cost.json").read_text())
    return [], {
        "strategy": name, "steps": steps, "tokens_per_second": cost["tokens_per_second"],
        "attention": cost.get("attention"), "perplexities": result["rows"],
    }  # fmt: skip


def _command(arguments: list[str]) -> None:
    subprocess.run([sys.executable, "run.py", *arguments], cwd=ROOT, check=True)


def _there(package: str) -> bool:
    return subprocess.run([sys.executable, "-c", f"import {package}"], capture_output=True).returncode == 0


def all_pieces(toy: bool, again: bool = False) -> dict[str, Callable[[Path], Found]]:
    """By name, in the order in which they are worth a minute of a GPU."""
    scale = pieces.TOY if toy else pieces.GPU
    found: dict[str, Callable[[Path], Found]] = {
        "parity-other": lambda out: parity("other", toy, out),
        "attention": lambda out: pieces.attention(scale, out),
        "step": lambda out: pieces.step(scale, out),
        "evaluation": lambda out: pieces.evaluation(scale, out),
        "parity-bf16": lambda out: parity("bf16", toy, out),
        "parity-fp16": lambda out: parity("fp16", toy, out),
    }
    for steps in (4,) if toy else (300, 2000):
        for name in STRATEGIES:
            found[f"trained-{steps}-{name}"] = lambda out, s=steps, n=name: trained(s, n, toy, again, out)  # type: ignore[misc]
    return found


def run(name: str, piece: Callable[[Path], Found], out: Path, limit: int = LIMIT) -> None:
    """Do one piece and add its record to the records; a piece that fails leaves its error there."""
    start, error = time.monotonic(), None
    rows: list[Row] = []
    details: dict[str, Any] = {}

    def late(*_: object) -> None:
        raise TimeoutError(f"cut off after {limit} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(limit)
    try:
        rows, details = piece(out)
    except Exception as failure:  # one piece's fault is no reason to lose the next piece's minutes
        error = f"{type(failure).__name__}: {failure}"
        print(f"{name}: {error}", file=sys.stderr)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    commit = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True)
    record = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "machine": machine(),
        "seconds": time.monotonic() - start,
        "error": error,
        "rows": [asdict(row) | {"verdict": row.verdict} for row in rows],
        **details,
    }
    kind = name.partition("-")[0]  # few files travel: all of a kind are in one
    path = out / f"{kind}.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    pieces.write(path, known | {name: record})


def records(out: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(out.glob("*.json")):
        found |= json.loads(path.read_text())
    return found


def report(out: Path, names: list[str]) -> str:
    """A table in Markdown of every goal, and what is missing."""
    known = records(out)
    lines = ["| piece | what | device | value | goal | verdict |", "|---|---|---|---|---|---|"]
    missing = []
    for name in names:
        record = known.get(name)
        if record is None or record["error"]:
            missing.append(f"{name}: {record['error'] if record else 'not run'}")
            continue
        for row in record["rows"]:
            value = "not measured" if row["value"] is None else f"{row['value']:.3g} {row['unit']}".strip()
            goal = f"{'≥' if row['at_least'] else '≤'} {row['limit']:g}"
            # a toy on a CPU says that the piece runs, and nothing about the goal
            verdict = row["verdict"] if record["device"] != "cpu" or name.startswith("parity") else "dry run"
            lines.append(f"| {name} | {row['name']} | {record['device']} | {value} | {goal} | {verdict} |")
        if "perplexities" in record:
            full = [r for r in record["perplexities"] if r["protocol"] == "full"]
            text = ", ".join(f"{r['length']}: {r['ppl']:.4g}" for r in full)
            lines.append(f"| {name} | perplexity by length | {record['device']} | {text} | | |")
    gone = "\n".join(f"- {line}" for line in missing) or "Nothing."
    return "\n".join(lines) + f"\n\nMissing:\n\n{gone}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pieces", nargs="*", help="names; all if none is given, `report` for none")
    parser.add_argument("--toy", action="store_true", help="on the CPU, at a toy size")
    parser.add_argument("--again", action="store_true", help="run what has a record too")
    parser.add_argument("--limit", type=int, default=LIMIT, help="seconds after which a piece is cut off")
    parser.add_argument("--out", type=Path, help="folder of the records")
    given = parser.parse_args()
    if given.toy:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    out = given.out or (ROOT / "logs" / "gpu-toy" / "records" if given.toy else RECORDS / "gpu")
    out.mkdir(parents=True, exist_ok=True)
    known = all_pieces(given.toy, given.again)
    if unknown := [name for name in given.pieces if name not in (*known, "report")]:
        parser.error(f"got {unknown[0]!r}, expected some of {', '.join(known)}, report")
    if not given.toy and not torch.cuda.is_available() and given.pieces != ["report"]:
        parser.error("there is no CUDA device here; --toy runs the pieces on the CPU")
    done = records(out)
    for name in [name for name in known if name in given.pieces or not given.pieces]:
        if given.again or name not in done or done[name]["error"]:
            print(f"== {name}", flush=True)
            run(name, known[name], out, given.limit)
    text = report(out, list(known))
    (out / "report.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
