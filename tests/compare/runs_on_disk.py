"""Writes finished runs with the files of `fit` and `test` and with known numbers."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from kerple.compare.finished_runs import FinishedRun
from kerple.measure import results_table
from kerple.measure.results_table import Row

LENGTHS = (64, 128, 256, 512)
BYTES_PER_TOKEN = 3.5
# perplexity at each length: one strategy improves, one stays almost constant, one collapses
CURVES = {"KerpleLog": (18.5, 17.9, 17.4, 17.2), "ALiBi": (18.6, 18.2, 18.1, 18.1), "RoPE": (18.4, 21.0, 26.0, 37.0)}


def write_run(
    directory: Path,
    strategy: str,
    seed: int,
    curve: tuple[float, ...],
    blocks: int = 12,
    about: dict[str, Any] | None = None,
    lengths: tuple[int, ...] = LENGTHS,
    **cost: Any,
) -> Path:
    """Write a finished run in ``directory``, and return the folder of its test.

    The perplexities of ``curve``, one for each length, are multiplied by 1 + (seed - 1236) / 1000. ``about`` and
    ``cost`` are further entries of the description of the test, and of the cost. The text has ``blocks`` blocks.
    """
    test = directory / "test"
    test.mkdir(parents=True)
    config = {
        "seed_everything": seed,
        "output": str(directory),
        "model": {"position": {"class_path": f"kerple.positions.{strategy}"}, "layers": 2},
        "data": {"class_path": "kerple.data.TokenShards", "init_args": {"length": 64, "batch_size": 8}},
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    hardness, rows = np.random.default_rng(seed).normal(0, 0.2, blocks), []
    for protocol, extra in (("full", 0.0), ("windowed64", 0.01)):
        for length, ppl in zip(lengths, curve, strict=True):
            sums = (math.log(ppl * (1 + (seed - 1236) / 1000)) + extra + hardness - hardness.mean()) * 512
            rows += [Row("ppl", protocol, length, None, block, total, 512) for block, total in enumerate(sums)]
            bits, count = sums.sum() / math.log(2), int(512 * blocks * BYTES_PER_TOKEN)
            rows.append(Row("bits_per_byte", protocol, length, None, None, bits, count))
    results_table.add_to_results(test, "extrapolation", rows, {"split": "test", "block": 512} | (about or {}))
    (test / "kernels.csv").write_text(f"head,distance,bias\n0,1,{-0.1 * seed}\n")
    measured = {"tokens_per_second": 26_000.0 + seed, "peak_memory_bytes": 500 * 2**20, "parameters": 1_310_000}
    measured |= {"position_parameters": 8, "environment": {"torch": "2.13.0", "processor": "2 cores"}} | cost
    (directory / "cost.json").write_text(json.dumps(measured))
    return test


def write_runs(folder: Path, curves: dict[str, tuple[float, ...]], seeds: tuple[int, ...]) -> list[FinishedRun]:
    """Write a finished run of each strategy and seed. The keys of the curves are any labels."""
    return [
        FinishedRun(label, seed, write_run(folder / f"strategy-{i}" / f"seed-{seed}", label, seed, curve))
        for i, (label, curve) in enumerate(curves.items())
        for seed in seeds
    ]


def write_task_run(directory: Path, strategy: str, seed: int, accuracies: dict[str, tuple[float, ...]]) -> Path:
    """Write a finished run on tasks: exact match at lengths 10, 20, 30, 40, trained to 20, on 50 examples each."""
    test = write_run(directory, strategy, seed, (18.0,) * len(LENGTHS))
    reconfigure(directory, data={"length": 20})
    (test / results_table.ABOUT).unlink()
    rows = [
        Row("exact_match", task, length, None, None, value * 50, 50)
        for task, values in accuracies.items()
        for length, value in zip((10, 20, 30, 40), values, strict=False)  # fewer lengths for fewer values
    ]
    results_table.add_to_results(test, "accuracy", rows, {})
    return test


def reconfigure(directory: Path, data: dict[str, Any] | None = None, **changes: Any) -> None:
    """Change the configuration of a run: options of its data, and other settings."""
    path = directory / "config.yaml"
    config = yaml.safe_load(path.read_text()) | changes
    config["data"]["init_args"] |= data or {}
    path.write_text(yaml.safe_dump(config))
