"""Search of a training recipe on the validation split: ``python -m benchmarks.recipe.search STAGE …``.

A stage of `stages.yaml` is a list of trials; a trial is a set of flags of `run.py fit` that differ from the stage's
base, and a strategy may have flags of its own. Each is trained with each strategy on the same number of tokens and
scored on validation blocks of `far` times the training length (or `score.length`), 8 times if the stage has no `far`:
at that length and, where it has, at the whole block, in full and with a window of that length. One row a run is
appended to `runs.csv`, and what has a row is not run again. Of two processes, one a core, each takes every second run:
``--share 1 2`` and ``--share 2 2``.

``--task NAME -- FLAG …`` searches settings of a task instead: `configs/tasks/NAME.yaml` is trained with the flags and
scored by exact match on 200 problems of 1, 2 and 3 times the training length of the validation draw, which shares none
with training; a row a seed is appended to `tasks.csv`. The test split is never opened.
"""

import argparse
import csv
import itertools
import json
import math
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from kerple.cli.main import main as run
from kerple.cli.trained import load_trained
from kerple.data import TokenShards
from kerple.measure.protocols import full, windowed
from kerple.model import Transformer
from kerple.positions.visibility import Visibility
from kerple.tasks import TaskData
from kerple.tasks.sampling import collate

HERE = Path(__file__).parent
RUN = ["stage", "strategy", "seed", "tokens", "settings"]
SCORES = ["loss_1x", "loss_full_far", "loss_windowed_far", "gain_far", "gain_error", "ppl_1x"]
TARGETS = 65_536
QUIET = [
    "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false", "--trainer.limit_val_batches=0",
    "--trainer.num_sanity_val_steps=0", "--trainer.enable_progress_bar=false",
]  # fmt: skip


def runs(stage: str) -> Iterator[tuple[dict[str, Any], int]]:
    """The runs of a stage, strategy by strategy, and how many training lengths each is scored at; 0 for one alone."""
    plan = yaml.safe_load((HERE / "stages.yaml").read_text())[stage]
    for strategy, flags in plan["strategies"].items():
        for trial in plan["trials"]:
            for seed in plan["seeds"]:
                settings = {**plan["base"], **flags, **trial}
                values = (stage, strategy, seed, plan["tokens"], json.dumps(settings, sort_keys=True))
                yield dict(zip(RUN, values, strict=True)), plan.get("far", 0)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append(path: Path, row: list[object]) -> None:
    with path.open("a", newline="") as file:
        csv.writer(file).writerow(row)
    print(*row, flush=True)


def fit(*flags: str) -> tuple[Any, Any]:
    """The model and the data of a run of `run.py fit` in a folder that goes at the end."""
    with tempfile.TemporaryDirectory() as folder:
        run(["fit", *flags, f"--run_dir={folder}/run", '--trainer.callbacks=[{"class_path": "LastCheckpoint"}]'])
        return load_trained(f"{folder}/run/checkpoints/last.ckpt")


def train(strategy: str, seed: int, tokens: int, settings: dict[str, Any]) -> tuple[Transformer, TokenShards]:
    """Train on this number of tokens with settings named as flags."""
    steps = tokens // (settings["data.length"] * settings["data.batch_size"])
    every = {"trainer.precision": "32-true", "trainer.gradient_clip_val": 1.0, "model.position": strategy}
    every |= {"data": "TokenShards", "data.seed": seed, "seed_everything": seed, "trainer.max_steps": steps, **settings}
    flags = [
        f"--{key}={json.dumps(value) if isinstance(value, list | bool) else value}" for key, value in every.items()
    ]
    model, data = fit(*QUIET, *(flag for flag in flags if not flag.startswith("--score.")))
    return model.network, data


@torch.no_grad()
def score(network: Transformer, data: TokenShards, length: int, far: int) -> dict[str, float]:
    """Mean losses in nats over blocks spread evenly over the validation split; what the text farther away than
    ``length`` gains in segments of ``far`` times as many, with the standard error of its mean over the blocks."""
    longest = (far or 8) * length
    blocks = data.text("validation").blocks(longest)
    chosen = np.linspace(0, len(blocks) - 1, TARGETS // longest).astype(int)
    tokens = [blocks[int(index)][None] for index in chosen]  # (1, longest + 1) each
    near = statistics.mean([float(full(network, block, length).mean()) for block in tokens])
    scores: dict[str, float] = {"loss_1x": near, "ppl_1x": math.exp(near)}
    if far:
        everything = [float(full(network, block, longest).mean()) for block in tokens]
        window = [float(windowed(network, block, longest, Visibility(length)).mean()) for block in tokens]
        gains = np.subtract(window, everything)
        scores |= {"loss_full_far": statistics.mean(everything), "loss_windowed_far": statistics.mean(window)}
        scores |= {"gain_far": gains.mean(), "gain_error": gains.std(ddof=1) / len(gains) ** 0.5}
    return {key: round(float(value), 5) for key, value in scores.items()}


@torch.no_grad()
def exact_match(network: Transformer, data: TaskData, times: int) -> float:
    """Fraction of exact answers to problems of this multiple of the training length."""
    batch = collate(data.sampler.distinct("validation", 200, times * data.train_length))
    tokens = batch["tokens"]  # (B, T + 1)
    right = network(tokens[:, :-1]).argmax(-1) == tokens[:, 1:]  # (B, T)
    return float((right | ~batch["scored"]).all(1).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", help="names of stages in stages.yaml; with --task, flags of fit behind --")
    parser.add_argument("--task", help="name of a file in configs/tasks, such as long_addition")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1235, 1236, 1237], help="with --task")
    parser.add_argument(
        "--share", type=int, nargs=2, default=[1, 1], metavar=("I", "N"), help="every Nth run, from the Ith"
    )
    options = parser.parse_args()
    if options.task:
        configs = [f"--config=configs/tasks/{name}.yaml" for name in ("base", options.task)]
        for seed in options.seeds:
            model, data = fit(*configs, *options.stages, f"--seed_everything={seed}", f"--data.seed={seed}")
            shares = [f"{exact_match(model.network, data, times):.3f}" for times in (1, 2, 3)]
            append(HERE / "tasks.csv", [options.task, " ".join(options.stages), seed, *shares])
        return
    for stage in options.stages:
        for row, far in itertools.islice(runs(stage), options.share[0] - 1, None, options.share[1]):
            if any(all(str(row[key]) == done[key] for key in RUN[1:]) for done in rows(HERE / "runs.csv")):
                continue
            settings = json.loads(row["settings"])
            network, data = train(row["strategy"], row["seed"], row["tokens"], settings)
            scores = score(network, data, settings.get("score.length", data.length), far)
            append(HERE / "runs.csv", [*row.values(), *(scores.get(name, "") for name in SCORES)])


if __name__ == "__main__":
    main()
