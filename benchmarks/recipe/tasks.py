"""Search for settings of a task: ``python -m benchmarks.recipe.tasks --task long_addition --seeds 1235 -- FLAG …``.

The task is a file of ``configs/tasks``, and the flags are those of ``run.py fit``. Each model is scored by exact match
on 200 problems of 1, 2 and 3 times the training length of the validation draw, which shares none with training; beyond
the training length, a problem can be one of the test's.
A row a seed is appended to ``tasks.csv``.
"""

import argparse
import csv
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from kerple.cli.main import main as run
from kerple.cli.predict import load
from kerple.model import Transformer
from kerple.tasks import TaskData
from kerple.tasks.sampling import collate

ROWS = Path(__file__).with_name("tasks.csv")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", required=True, help="name of a file in configs/tasks, such as long_addition")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1235, 1236, 1237])
    parser.add_argument("flags", nargs="*", help="of `run.py fit`, behind --")
    given = parser.parse_args()
    configs = [f"--config=configs/tasks/{name}.yaml" for name in ("base", given.task)]
    for seed in given.seeds:
        with tempfile.TemporaryDirectory() as folder:
            own = [f"--seed_everything={seed}", f"--data.seed={seed}", f"--run_dir={folder}/run"]
            run(["fit", *configs, *given.flags, *own])
            model, data = load(f"{folder}/run/checkpoints/last.ckpt")
        assert isinstance(data, TaskData)
        row = [given.task, " ".join(given.flags), seed, *(f"{accuracy:.3f}" for accuracy in score(model.network, data))]
        new = not ROWS.exists()
        with ROWS.open("a", newline="") as file:
            csv.writer(file).writerows([["task", "flags", "seed", "1x", "2x", "3x"], row] if new else [row])
        print(*row, flush=True)


@torch.no_grad()
def score(network: Transformer, data: TaskData) -> list[float]:
    """Shares of problems whose whole answer is right, at 1, 2 and 3 times the training length."""
    lengths = [times * data.train_length for times in (1, 2, 3)]
    return [_exact(network, collate(data.sampler.distinct("validation", 200, length))) for length in lengths]


def _exact(network: Transformer, batch: dict[str, Tensor]) -> float:
    tokens = batch["tokens"]  # (B, T + 1)
    right = network(tokens[:, :-1]).argmax(-1) == tokens[:, 1:]  # (B, T)
    return float((right | ~batch["scored"]).all(1).double().mean())


if __name__ == "__main__":
    main()
