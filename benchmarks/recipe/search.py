"""Search of a training recipe on the validation split: ``python -m benchmarks.recipe.search STAGE …``.

A stage of `stages.yaml` is a list of trials; a trial is a set of settings that differ from the stage's base. Each is
trained with each strategy on the same number of tokens, as `run.py fit` would, and scored on validation blocks of 8
times the training length (or `score.length`): at that length and, where the stage says `far`, at the whole block, in
full and with the window of that length. One row a run is appended to `runs.csv`, and what has a row is not run again: a
stage can be stopped, and shared by several processes. The test split is never opened.
"""

import argparse
import csv
import hashlib
import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from filelock import FileLock, Timeout
from pytorch_lightning import Trainer, seed_everything

import kerple.positions as positions
from kerple.data import TokenShards
from kerple.evaluation.protocols import full, windowed
from kerple.model import Transformer
from kerple.positions import Position, Shape
from kerple.training.language_model import LanguageModel

HERE = Path(__file__).parent
RUN = ["strategy", "seed", "tokens", "settings"]  # what a run is
SCORES = ["loss_1x", "loss_full_8x", "loss_windowed_8x", "gain_8x", "gain_error", "ppl_1x"]
TARGETS = 65_536


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="+", help="names of stages in stages.yaml, in the order to run them")
    stages = parser.parse_args().stages
    os.environ.setdefault("MKL_CBWR", "AUTO")  # as run.py
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for stage in stages:
        while any(once(stage, run, far) for run, far in runs(stage)):
            pass  # stages.yaml is read again after each run


def runs(stage: str) -> list[tuple[dict[str, Any], bool]]:
    """The runs of a stage, strategy by strategy, and whether each is scored beyond the training length too."""
    said = yaml.safe_load((HERE / "stages.yaml").read_text())[stage]
    return [
        (
            {"strategy": strategy, "seed": seed, "tokens": said["tokens"], "settings": {**said["base"], **trial}},
            said.get("far", False),
        )
        for strategy in said["strategies"]
        for trial in said["trials"]
        for seed in said["seeds"]
    ]


def once(stage: str, run: dict[str, Any], far: bool) -> bool:
    """Do a run unless it has a row or another process is at it; whether it was done."""
    row = {**run, "settings": json.dumps(run["settings"], sort_keys=True)}
    name = hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:16]
    (HERE / ".locks").mkdir(exist_ok=True)
    try:
        with FileLock(HERE / ".locks" / name, timeout=0):
            if any(all(str(row[key]) == done[key] for key in RUN) for done in table()):
                return False
            row = {"stage": stage, **row, **train_and_score(**run, far=far)}
            with FileLock(HERE / ".locks" / "table"), (HERE / "runs.csv").open("a", newline="") as file:
                writer = csv.DictWriter(file, ["stage", *RUN, *SCORES])
                if not file.tell():
                    writer.writeheader()
                writer.writerow(row)
            print(*row.values(), flush=True)
            return True
    except Timeout:
        return False


def table() -> list[dict[str, str]]:
    """The rows there are."""
    if not (HERE / "runs.csv").exists():
        return []
    with (HERE / "runs.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def train_and_score(strategy: str, seed: int, tokens: int, settings: dict[str, Any], far: bool) -> dict[str, float]:
    """Train a model with settings named as on the command line, ``model.lr`` for instance; its scores."""
    data, model, trainer, scoring = (
        {key.removeprefix(part): value for key, value in settings.items() if key.startswith(part)}
        for part in ("data.", "model.", "trainer.", "score.")
    )
    seed_everything(seed, verbose=False)
    shards = TokenShards(**data, seed=seed)

    def position(shape: Shape) -> Position:
        return positions.build(strategy, dim=shape.dim, heads=shape.heads, length=shape.length)

    module = LanguageModel(position, shards.vocabulary, shards.length, **model)
    Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=tokens // (shards.length * shards.batch_size),
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        **{"precision": "32-true", **trainer},
    ).fit(module, shards)
    return score(module.network.eval(), shards, scoring.get("length", shards.length), far)


@torch.no_grad()
def score(network: Transformer, data: TokenShards, length: int, far: bool) -> dict[str, float]:
    """Mean losses in nats over blocks spread evenly over the validation split; what the text farther away than
    ``length`` gains, with the standard error of its mean over the blocks."""
    blocks = data.blocks("validation", 8 * length)
    chosen = np.linspace(0, len(blocks) - 1, TARGETS // (8 * length)).astype(int)
    near, everything, window = [], [], []  # one mean a block
    for index in chosen:
        tokens = blocks[int(index)]["tokens"][None]
        near.append(float(full(network, tokens, length).mean()))
        if far:
            everything.append(float(full(network, tokens, 8 * length).mean()))
            window.append(float(windowed(network, tokens, 8 * length, window=length).mean()))
    scores = {"loss_1x": float(np.mean(near)), "ppl_1x": math.exp(np.mean(near))}
    if far:
        gains = np.subtract(window, everything)
        scores |= {
            "loss_full_8x": float(np.mean(everything)),
            "loss_windowed_8x": float(np.mean(window)),
            "gain_8x": float(gains.mean()),
            "gain_error": float(gains.std(ddof=1) / len(gains) ** 0.5),
        }
    return {key: round(value, 5) for key, value in scores.items()}


if __name__ == "__main__":
    main()
