"""Trainings of `benchmarks.gpu`: of the 162M model, and the runs of configs/compare/ranking.yaml.

``python -m benchmarks.gpu.trainings`` packs the shards of the corpus `code` for a GPU machine without a network.
"""

import contextlib
import json
import random
import shutil
import subprocess
import sys
import tarfile
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml
from zstandard import ZstdCompressionParameters, ZstdCompressor, ZstdDecompressor

from benchmarks.measure import record
from kerple.compare import committed_records
from kerple.compare.comparison_file import Comparison, comparison_parser
from kerple.compare.engines import LocalProcesses
from kerple.compare.resolution import find_changed_runs, plan_runs, reuse_records
from kerple.compare.run_discovery import PACKED
from kerple.config.parsing import parse
from kerple.measure import results_table

ROOT = Path(__file__).parents[2]
FILE = Path("configs/compare/ranking.yaml")
SHARDS, ARCHIVE = Path("data/code-bpe2048"), Path("data/gpu-bundle/code.tar.zst")
ORDER = 76  # seed of the order of the runs: a stopped series is a random sample of strategies and lengths
TOY_RANKING = {  # flags of a run that takes a CPU a few seconds; its shards are those of `make gpu-bundle`
    "trainer.accelerator": "cpu", "trainer.precision": "32-true", "trainer.max_steps": 4,
    "trainer.val_check_interval": 4,
    "model.layers": 4, "model.dim": 32, "model.heads": 2, "model.compile": False, "data.corpus": None,
    "data.vocabulary": 16384, "data.directory": "data/gpu-bundle/shards", "data.validation_segments": 4,
}  # fmt: skip
TOY_TEST = {"class_path": "Extrapolation", "init_args": {"lengths": [128, 256], "blocks": 2}}
TOY = [  # sizes at which a CPU trains in seconds
    "--model.layers=2", "--model.dim=32", "--model.heads=2", "--model.compile=false", "--trainer.log_every_n_steps=1",
    "--data.length=32", "--data.batch_size=4", "--data.validation_segments=4", "--trainer.val_check_interval=4",
    "--trainer.accelerator=cpu", "--trainer.precision=32-true",
    '--trainer.callbacks=[{"class_path": "LastCheckpoint"}, {"class_path": "Throughput"}, '
    '{"class_path": "Extrapolation", "init_args": {"lengths": [32, 64, 128], "blocks": 2, "validation_blocks": 0}}]',
]  # fmt: skip


def command(*arguments: str) -> None:
    """Run a command of run.py. If it fails, raise an error with the last line of its standard error."""
    process = subprocess.run([sys.executable, "run.py", *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    if process.returncode:
        raise RuntimeError((process.stderr.splitlines() or [f"run.py ended with status {process.returncode}"])[-1])


def train(steps: int, name: str, toy: bool) -> dict[str, Any]:
    """Train and test a strategy on the bundle's shards, and return its perplexity by length and the training speed.

    An interrupted training continues from its last checkpoint.
    """
    code = str(record()["code"])  # a training with different code is not continued
    folder = ROOT / "logs" / ("gpu-toy" if toy else "gpu") / code / f"{steps}-steps" / name
    last = folder / "checkpoints" / "last.ckpt"
    if not last.exists():  # interrupted before the first checkpoint; fit would write to a second folder
        shutil.rmtree(folder, ignore_errors=True)
    flags = ["--config=configs/gpu.yaml", f"--model.position={name}", f"--trainer.max_steps={steps}"]
    command("fit", *flags, *(TOY if toy else []), f"--output={folder}", "--ckpt_path=last")
    shutil.rmtree(folder / "test", ignore_errors=True)  # of an interrupted test
    command("test", f"--ckpt_path={last}", f"--output={folder / 'test'}")
    cells = results_table.totals(results_table.read(folder / "test")[0]).query("metric == 'ppl' and protocol == 'full'")
    perplexity = dict(zip(cells["length"].tolist(), cells["value"].tolist(), strict=True))
    return {"perplexity": perplexity, **_speed(json.loads((folder / "cost.json").read_text()))}


def order() -> list[tuple[str, int]]:
    """Return label and seed of each run, in the order in which they are trained."""
    content = yaml.safe_load((ROOT / FILE).read_text())
    return random.Random(ORDER).sample(runs := list(product(content["strategies"], content["seeds"])), len(runs))


def rank(label: str, seed: int, toy: bool, out: Path) -> dict[str, Any]:
    """Make a run of the comparison, and return whether its losses are finite, and its speed.

    Its losses are not returned, because the plan allows nobody to read them before nine runs are finished. The run is
    made as `compare` makes it, but no report is written, because the report needs Plotly. The archive of all records is
    copied to OUT/ranking-records.zip.zst. As results/ranking/records.zip.zst, it makes later calls skip these runs, and
    ``compare --report_only true`` reads it.

    Args:
        label: Label of the strategy in the comparison file.
        seed: Seed of the run.
        toy: Whether to make a run of four steps on the CPU.
        out: Folder for the archive of all records.

    Raises:
        RuntimeError: If the run fails, with the last lines of its log.
    """
    if not (toy or (ROOT / SHARDS / "manifest.json").exists()):
        unpack()
    with contextlib.chdir(ROOT):  # the paths in the comparison file are relative to it
        comparison = _comparison(label, seed, toy, out / "ranking")
        runs = plan_runs(comparison, parallel=1, report_only=False)
        find_changed_runs(runs, report_only=False, rerun_changed=False)
        reuse_records(runs, comparison, report_only=False)
        missing = [run for run in runs if not committed_records.finished(run)]
        # closed after an exception too, so that a stopped run saves its checkpoint
        with contextlib.closing(LocalProcesses(parallel=1).run(missing)) as running:
            for run, error in filter(None, running):
                if error:
                    raise RuntimeError(error)
                committed_records.write_record(run, comparison.report_folder, comparison.records)
        committed_records.pack(comparison.report_folder)
        shutil.copy(comparison.report_folder / PACKED, out / f"ranking-{PACKED}")
        table, about = results_table.read(runs[0].test_folder)
    return {"finite": bool(np.isfinite(table["sum"]).all()), **_speed(about["run"]["cost"])}


def _comparison(label: str, seed: int, toy: bool, out: Path) -> Comparison:
    """Return the comparison with one strategy and seed. At the toy size, it writes runs and records to ``out``."""
    content = yaml.safe_load((ROOT / FILE).read_text())
    strategy = content["strategies"][label]
    arguments = [f"--config={FILE}", f"--seeds=[{seed}]", f"--baseline={label}"]
    if toy:
        strategy["flags"]["data.batch_size"] = 2
        test = content["test"] | {"trainer.accelerator": "cpu", "trainer.callbacks": [TOY_TEST]}
        arguments += [f"--flags={json.dumps(content['flags'] | TOY_RANKING)}", f"--test={json.dumps(test)}"]
        arguments += [f"--runs={out / 'runs'}", f"--output={out / 'report'}", "--plan=null", "--plan_page=null"]
    arguments.append(f"--strategies={json.dumps({label: strategy})}")
    return Comparison.from_options(parse(comparison_parser(), arguments))


def _speed(cost: dict[str, Any]) -> dict[str, Any]:
    """Return training speed and seconds of compilation from the costs of a fit."""
    return {name: cost[name] for name in ("tokens_per_second", "compilation_seconds")}


def pack() -> None:
    """Compress the shards of the corpus `code` into `ARCHIVE`: from 124 MiB to 30 MiB in about three minutes."""
    parameters = ZstdCompressionParameters.from_level(17, window_log=27, enable_ldm=True)
    (ROOT / ARCHIVE).parent.mkdir(parents=True, exist_ok=True)
    part = (ROOT / ARCHIVE).with_suffix(".part")
    compressor = ZstdCompressor(compression_params=parameters)
    with (
        part.open("wb") as file,
        compressor.stream_writer(file) as stream,
        tarfile.open(fileobj=stream, mode="w|") as archive,
    ):
        for path in sorted((ROOT / SHARDS).glob("[!.]*")):
            archive.add(path, SHARDS / path.name)
    part.rename(ROOT / ARCHIVE)


def unpack() -> None:
    """Unpack `ARCHIVE` in the project's folder. A stopped call leaves no part of the shards there."""
    decompressor = ZstdDecompressor(max_window_size=2**27)
    with (
        (ROOT / ARCHIVE).open("rb") as file,
        decompressor.stream_reader(file) as stream,
        tarfile.open(fileobj=stream, mode="r|") as archive,
        TemporaryDirectory(dir=(ROOT / ARCHIVE).parent) as folder,
    ):
        archive.extractall(folder, filter="data")
        shutil.rmtree(ROOT / SHARDS, ignore_errors=True)  # a preparation that was stopped
        (Path(folder) / SHARDS).rename(ROOT / SHARDS)


if __name__ == "__main__":
    pack()
