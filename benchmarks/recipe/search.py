"""Search for a training recipe on the validation split: ``python -m benchmarks.recipe.search STAGE …``.

A stage of `stages.yaml` is a list of trials. A trial consists of flags of `run.py fit`, which are added to those of the
stage and of a strategy. Each trial is trained with each strategy and seed on the same number of tokens. It is scored on
validation blocks of `far` times the training length (8 times if the stage has no `far`), in segments of the training
length. A stage with `far` also scores whole blocks, with full attention and with a window of the training length. The
flag `score.length` replaces the training length in scores. Each run appends a row to `runs.csv`. Runs that have a row
are skipped. Two processes can divide the runs of a stage: ``--share 1 2`` and ``--share 2 2``.

``--task NAME -- FLAG …`` searches settings of a task instead. It trains `configs/tasks/NAME.yaml` with the flags. The
score is exact match on 200 validation problems of 1, 2 and 3 times the training length. No validation problem occurs in
training. Each seed appends a row to `tasks.csv`. The test split is never read.
"""

import argparse
import csv
import json
import math
import statistics
import tempfile
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from kerple.cli.main import main as run
from kerple.compare.comparison_file import as_flags
from kerple.data import TokenShards
from kerple.measure.protocols import full, windowed
from kerple.model import Transformer
from kerple.positions.visibility import Visibility
from kerple.tasks import TaskData
from kerple.tasks.sampling import collate
from kerple.training.trained_model import load_trained

HERE = Path(__file__).parent
RUN = ["stage", "strategy", "seed", "tokens", "settings"]
SCORES = ["loss_1x", "loss_full_far", "loss_windowed_far", "gain_far", "gain_error", "ppl_1x"]
TARGETS = 65_536
QUIET = [
    "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false", "--trainer.limit_val_batches=0",
    "--trainer.num_sanity_val_steps=0", "--trainer.enable_progress_bar=false",
]  # fmt: skip


def runs(stage: str) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the runs of a stage, with their value of ``far``; 0 if the stage has none."""
    plan = yaml.safe_load((HERE / "stages.yaml").read_text())[stage]
    for (strategy, flags), trial, seed in product(plan["strategies"].items(), plan["trials"], plan["seeds"]):
        values = (stage, strategy, seed, plan["tokens"], json.dumps({**plan["base"], **flags, **trial}, sort_keys=True))
        yield dict(zip(RUN, values, strict=True)), plan.get("far", 0)


def append(path: Path, row: list[object]) -> None:
    """Append a row to a CSV file, and print it."""
    with path.open("a", newline="") as file:
        csv.writer(file).writerow(row)
    print(*row, flush=True)


def fit(*flags: str) -> tuple[Any, Any]:
    """Run `run.py fit` in a temporary folder, and return the trained model and the data module."""
    with tempfile.TemporaryDirectory() as folder:
        run(["fit", *flags, f"--output={folder}/run", '--trainer.callbacks=[{"class_path": "LastCheckpoint"}]'])
        return load_trained(f"{folder}/run/checkpoints/last.ckpt")


def train(strategy: str, seed: int, tokens: int, settings: dict[str, Any]) -> tuple[Transformer, TokenShards]:
    """Train a network with these flags of `fit`, and return it with its data."""
    steps = tokens // (settings["data.length"] * settings["data.batch_size"])
    every = {"trainer.precision": "32-true", "trainer.gradient_clip_val": 1.0, "model.position": strategy}
    every |= {"data": "TokenShards", "data.seed": seed, "seed_everything": seed, "trainer.max_steps": steps, **settings}
    every.pop("score.length", None)  # is not a flag of `fit`
    model, data = fit(*QUIET, *as_flags(every))
    return model.network, data


@torch.no_grad()
def score(network: Transformer, data: TokenShards, length: int, far: int) -> dict[str, float]:
    """Return mean losses, perplexity, and with ``far`` the context gain and its standard error over blocks.

    Losses and gains are in nats. The blocks are spread evenly over the validation split. ``length`` is the length of
    segments, and the window of the context gain. ``far`` times ``length`` is the length at which the gain is measured.
    """
    longest = (far or 8) * length
    blocks = data.text("validation").blocks(longest)
    chosen = np.linspace(0, len(blocks) - 1, TARGETS // longest).astype(int)
    tokens = [blocks[int(index)][None] for index in chosen]  # (1, longest + 1) each
    loss = statistics.mean([float(full(network, block, length).mean()) for block in tokens])
    scores: dict[str, float] = {"loss_1x": loss, "ppl_1x": math.exp(loss)}
    if far:
        full_losses = [float(full(network, block, longest).mean()) for block in tokens]
        window_losses = [float(windowed(network, block, longest, Visibility(length)).mean()) for block in tokens]
        gains = np.subtract(window_losses, full_losses)
        scores |= {"loss_full_far": statistics.mean(full_losses), "loss_windowed_far": statistics.mean(window_losses)}
        scores |= {"gain_far": gains.mean(), "gain_error": gains.std(ddof=1) / len(gains) ** 0.5}
    return {key: round(float(value), 5) for key, value in scores.items()}


@torch.no_grad()
def exact_match(network: Transformer, data: TaskData, times: int) -> float:
    """Return the fraction of problems of ``times`` the training length whose answer is exact."""
    batch = collate(data.sampler.distinct("validation", 200, times * data.train_length))
    tokens = batch["tokens"]  # (B, T + 1)
    correct = network(tokens[:, :-1]).argmax(-1) == tokens[:, 1:]  # (B, T)
    return float((correct | ~batch["scored"]).all(1).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", help="names of stages in stages.yaml; with --task: -- and flags of fit")
    parser.add_argument("--task", help="name of a file in configs/tasks, such as long_addition")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1235, 1236, 1237], help="seeds of --task")
    share = "only every Nth run, starting with run I"
    parser.add_argument("--share", type=int, nargs=2, default=[1, 1], metavar=("I", "N"), help=share)
    options = parser.parse_args()
    if options.task:
        configs = [f"--config=configs/tasks/{name}.yaml" for name in ("base", options.task)]
        for seed in options.seeds:
            model, data = fit(*configs, *options.stages, f"--seed_everything={seed}", f"--data.seed={seed}")
            fractions = [f"{exact_match(model.network, data, times):.3f}" for times in (1, 2, 3)]
            append(HERE / "tasks.csv", [options.task, " ".join(options.stages), seed, *fractions])
        return
    for stage in options.stages:
        with (HERE / "runs.csv").open(newline="") as file:
            done = [[row[key] for key in RUN[1:]] for row in csv.DictReader(file)]
        for row, far in islice(runs(stage), options.share[0] - 1, None, options.share[1]):
            if [str(row[key]) for key in RUN[1:]] in done:
                continue
            settings = json.loads(row["settings"])
            network, data = train(row["strategy"], row["seed"], row["tokens"], settings)
            scores = score(network, data, settings.get("score.length", data.length), far)
            append(HERE / "runs.csv", [*row.values(), *(scores.get(name, "") for name in SCORES)])


if __name__ == "__main__":
    main()
