"""Run directories as `fit` and `test` write them, with numbers that are known beforehand."""

import json
import math
from pathlib import Path

import numpy as np
import yaml

LENGTHS = (64, 128, 256, 512)
BYTES_PER_TOKEN = 3.5
# perplexity at each length: one strategy that improves, one that stays, one that collapses
CURVES = {
    "KerpleLog": (18.5, 17.9, 17.4, 17.2),
    "ALiBi": (18.6, 18.2, 18.1, 18.1),
    "RoPE": (18.4, 21.0, 26.0, 37.0),
}


def write_run(
    directory: Path,
    strategy: str,
    seed: int,
    curve: tuple[float, ...],
    blocks: int = 12,
    position_parameters: int = 8,
) -> Path:
    """A finished run whose perplexity over all blocks is exactly the curve times 1 + (seed - 1236) / 1000."""
    generator = np.random.default_rng(seed)
    test = directory / "test"
    test.mkdir(parents=True)
    (directory / "config.yaml").write_text(
        yaml.safe_dump(
            {
                "seed_everything": seed,
                "run_dir": str(directory),
                "model": {"position": {"class_path": f"kerple.positions.{strategy}"}, "layers": 2},
                "data": {"class_path": "kerple.data.TokenShards", "init_args": {"length": 64, "batch_size": 8}},
            }
        )
    )
    hardness = generator.normal(0, 0.2, blocks)
    rows = []
    for protocol, window in (("full", None), ("windowed", 64)):
        for length, ppl in zip(LENGTHS, curve, strict=True):
            nats = math.log(ppl * (1 + (seed - 1236) / 1000)) + (0.01 if window else 0)
            block_nll = (nats + hardness - hardness.mean()) * 512
            total = math.fsum(block_nll)
            rows.append(
                {
                    "protocol": protocol,
                    "window": window,
                    "length": length,
                    "nll_sum": total,
                    "targets": 512 * blocks,
                    "ppl": math.exp(total / (512 * blocks)),
                    "bytes": int(512 * blocks * BYTES_PER_TOKEN),
                    "bits_per_byte": total / (512 * blocks) / math.log(2) / BYTES_PER_TOKEN,
                    "block_nll": list(block_nll),
                }
            )
    (test / "extrapolation.json").write_text(json.dumps({"split": "test", "rows": rows}))
    (test / "kernels.csv").write_text(f"head,distance,bias\n0,1,{-0.1 * seed}\n")
    (directory / "cost.json").write_text(
        json.dumps(
            {
                "tokens_per_second": 26_000.0 + seed,
                "peak_memory_bytes": 500 * 2**20,
                "parameters": 1_310_000,
                "position_parameters": position_parameters,
                "environment": {"python": "3.11.7", "torch": "2.13.0", "processor": "2 cores"},
            }
        )
    )
    return directory


def write_task_run(directory: Path, strategy: str, seed: int, accuracies: dict[str, tuple[float, ...]]) -> Path:
    """A finished run on tasks: exact match at lengths 10, 20, 30, 40, trained to 20, on 50 examples each."""
    write_run(directory, strategy, seed, (18,) * len(LENGTHS))
    config = yaml.safe_load((directory / "config.yaml").read_text())
    config["data"] = {"class_path": "kerple.data.TaskData", "init_args": {"length": 20}}
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    (directory / "test" / "extrapolation.json").unlink()
    rows = [
        {"metric": "exact_match", "protocol": task, "length": n, "value": value, "sum": value * 50, "count": 50}
        for task, values in accuracies.items()
        for n, value in zip((10, 20, 30, 40), values, strict=True)
    ]
    (directory / "test" / "tasks.json").write_text(json.dumps({"rows": rows}))
    return directory
