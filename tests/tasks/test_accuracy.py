"""Exact match and token accuracy: counted by hand, of networks that know the answers, and of trained ones."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from kerple.evaluation import results
from kerple.model.generation import fill_in
from kerple.positions import strategies
from kerple.tasks import Addition, AssociativeRecall, Copy, TaskData
from kerple.tasks.accuracy import AnswerAccuracy, TaskAccuracy, answer_table, result_rows
from kerple.tasks.base import Example
from kerple.tasks.vocabulary import CHARACTERS
from kerple.training.language_model import LanguageModel
from tests.toy import trainer

ROOT = Path(__file__).parents[2]


class Oracle(nn.Module):
    """A network that knows the sequences by heart, and says something else after a share of all prefixes."""

    prefix_consistent = False

    def __init__(self, sequences: list[list[int]], mistakes: float = 0.0) -> None:
        super().__init__()
        self.next = {tuple(s[:i]): s[i] for s in sequences for i in range(1, len(s))}
        self.mistakes = mistakes

    def forward(self, tokens: Tensor, window: None = None, cache: None = None, last: int | None = None) -> Tensor:
        rows = [[self.after(tuple(row[: i + 1])) for i in range(len(row))] for row in tokens.tolist()]
        return nn.functional.one_hot(torch.tensor(rows), len(CHARACTERS)).float()

    def after(self, prefix: tuple[int, ...]) -> int:
        right = self.next.get(prefix, 5)
        wrong = hash(prefix) % 1000 < 1000 * self.mistakes  # of integers: the same in every process
        return (right + 1) % len(CHARACTERS) if wrong else right


def measured(network: nn.Module, data: TaskData, generate: bool) -> Tensor:
    count = AnswerAccuracy(sum(map(len, data.test_problems)))
    for batch in data.test_dataloader():
        tokens, scored = batch["tokens"], batch["scored"]
        predictions = fill_in(network, tokens, scored)[:, 1:] if generate else network(tokens[:, :-1]).argmax(-1)
        count.update(predictions, tokens[:, 1:], scored, batch["index"])
    return count.compute()


@pytest.mark.parametrize("task", [Addition(), AssociativeRecall()], ids=lambda task: task.name)
def test_teacher_forced_and_generated_exact_match_agree(task):
    data = TaskData(task, 200, train_length=6, test_lengths=[3, 6, 7], test_examples=25)
    sequences = [example.tokens() for group in data.test_problems for example in group]
    right, scored = measured(Oracle(sequences), data, generate=True)
    assert right.tolist() == scored.tolist()
    assert scored.min() > 0
    network = Oracle(sequences, mistakes=0.08)
    forced, generated = (measured(network, data, generate) for generate in (False, True))
    exact = [right == scored for right, scored in (forced, generated)]
    assert exact[0].tolist() == exact[1].tolist()
    assert 0 < exact[0].sum() < len(exact[0])
    assert generated[0].sum() < forced[0].sum()  # after a mistake the oracle is lost: token accuracies differ


def test_counting_by_hand():
    targets = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 1, 1]])
    predictions = torch.tensor([[1, 2, 3], [4, 0, 6], [0, 8, 9], [1, 1, 1]])
    scored = torch.tensor([[0, 1, 1], [1, 1, 1], [0, 1, 0], [1, 1, 1]]).bool()
    count = AnswerAccuracy(4)
    count.update(predictions, targets, scored, torch.tensor([2, 0, 1, -1]))  # the last row is a filler
    counts = count.compute()
    assert counts.tolist() == [[2, 1, 2, 0], [3, 1, 2, 0]]
    examples = [Example("", "", sizes) for sizes in [(5,), (5,), (7,), (8,)]]  # that of length 8 was not read
    cells = results.totals(pd.DataFrame(result_rows("copy", answer_table(examples, counts))))
    values = zip(cells["metric"], cells["length"], cells["value"], strict=True)
    assert sorted(values) == [
        ("exact_match", 5, 0.5), ("exact_match", 7, 1.0), ("token_accuracy", 5, 0.75), ("token_accuracy", 7, 1.0),
    ]  # fmt: skip


def trained(
    data: TaskData, directory: Path, steps: int, position: str = "NoPE", **options: Any
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The sums and the description of a test after a fit."""
    sizes = {"layers": 2, "dim": 32, "heads": 2, "lr": 1e-2, "warmup": 0.1}
    model = LanguageModel(strategies()[position], data.vocabulary, data.length, **sizes)
    validation = {"check_val_every_n_epoch": None, "val_check_interval": steps, "num_sanity_val_steps": 0}
    steps = {"max_steps": steps, "gradient_clip_val": 1.0, "enable_checkpointing": False}
    run = trainer(directory, TaskAccuracy(**options), events=True, **steps, **validation)
    run.fit(model, data)
    run.test(model, data, verbose=False)
    table, about = results.read(directory)
    return table, about["evaluations"]["accuracy"]


@pytest.mark.filterwarnings("ignore")
def test_a_trained_model_is_reported_by_length_and_protocol(tmp_path):
    data = TaskData(Copy(repeated=True), 10, train_length=4, batch_size=32, test_examples=40, seed=0)
    table, about = trained(data, tmp_path, 80, generate=True)
    assert about["protocols"] == ["repeated copy", "repeated copy generated"]
    assert (about["strategy"], about["training_length"]) == ("NoPE", 4)
    exact = table[table["metric"] == "exact_match"].set_index(["length", "block"])
    forced, generated = (exact[exact["protocol"] == protocol]["sum"] for protocol in about["protocols"])
    pd.testing.assert_series_equal(forced, generated)  # example by example
    skipped = [cell["length"] for cell in about["skipped"]]
    assert list(forced.index) == [
        (n, i) for n in range(1, 9) if n not in skipped for i in range(len(data.test_problems[n - 1]))
    ]
    assert 0 < forced.sum() < len(forced)  # or agreement would say nothing
    of_metric = dict(iter(results.totals(table).set_index("length").groupby(["metric", "protocol"])))
    forced_cells = of_metric["exact_match", "repeated copy"]
    tokens = of_metric["token_accuracy", "repeated copy generated"]
    assert tokens["count"].tolist() == ((forced_cells.index + 1) * forced_cells["count"]).tolist()
    assert (tokens["value"] >= forced_cells["value"]).all()
    events = EventAccumulator(str(tmp_path), {"images": 0, "scalars": 0}).Reload()
    assert "analyses/accuracy" in events.Tags()["images"]
    logged = events.Scalars("test/exact_match/teacher_forced/5")[0].value
    assert logged == pytest.approx(forced_cells["value"][5])
    assert {"val/exact_match", "val/token_accuracy"} <= set(events.Tags()["scalars"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("lengths", "read"), [([1, 2, 8, 9], [1, 2]), ([8, 9], [])])
def test_lengths_beyond_the_last_position_are_skipped(tmp_path, lengths, read):
    data = TaskData(Addition(), 10, train_length=2, test_lengths=lengths, batch_size=8, test_examples=4)
    table, about = trained(data, tmp_path, 2, position="Learned")
    assert sorted(set(table["length"])) == read
    assert [cell["length"] for cell in about["skipped"]] == [8, 9]
    assert (tmp_path / "accuracy_map.png").exists() == bool(read)


@pytest.mark.slow
def test_the_command_line_reports_the_same_on_two_devices(tmp_path):
    """Through run.py, because a collective that one rank alone starts would hang there and nowhere else."""

    def run(*arguments: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, ROOT / "run.py", *arguments, "--trainer.accelerator=cpu"]
        subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=250)

    configs = (f"--config={ROOT}/configs/tasks/base.yaml", f"--config={ROOT}/configs/tasks/addition.yaml")
    run("fit", *configs, f"--run_dir={tmp_path}/run", "--trainer.max_steps=2", "--trainer.devices=2")
    tables = []
    for devices in (1, 2):
        folder = tmp_path / str(devices)
        test = (f"--ckpt_path={tmp_path}/run/checkpoints/last.ckpt", f"--run_dir={folder}", "--data.eval_batch_size=64")
        run("test", *test, f"--trainer.devices={devices}")
        tables.append(results.read(folder)[0])
    pd.testing.assert_frame_equal(*tables)
