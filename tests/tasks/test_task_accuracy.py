import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningDataModule, Trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kerple.positions import build
from kerple.tasks import Addition, Copy, Parity, Sort, TaskData
from kerple.tasks.accuracy import AnswerAccuracy
from kerple.tasks.batches import collate
from kerple.tasks.task_accuracy import TaskAccuracy, _final_answer, final_answer
from kerple.tasks.vocabulary import encode
from kerple.training.language_model import LanguageModel


def trained(data: TaskData, directory: Path, steps: int, position: str = "NoPE", **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = LanguageModel(
        lambda s: build(position, dim=s.dim, heads=s.heads, length=s.length),
        data.vocabulary, data.length, layers=2, dim=32, heads=2, lr=1e-2, warmup=0.1,
    )  # fmt: skip
    trainer = Trainer(
        max_steps=steps, callbacks=[TaskAccuracy(**options)], default_root_dir=directory, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, gradient_clip_val=1.0,
        check_val_every_n_epoch=None, val_check_interval=steps, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(model, data)
    trainer.test(model, data, verbose=False)
    found = json.loads((Path(trainer.log_dir) / "accuracy.json").read_text())
    found["directory"] = Path(trainer.log_dir)
    return found


def column(content: dict[str, Any], metric: str, key: str = "rows") -> dict[int, dict[str, Any]]:
    assert {row["protocol"] for row in content[key]} == {content["task"]}
    return {row["length"]: row for row in content[key] if row["metric"] == metric}


@pytest.mark.filterwarnings("ignore")
def test_a_trained_model_is_reported_by_length_and_protocol(tmp_path: Path) -> None:
    data = TaskData(Copy(repeated=True), 10, train_length=4, batch_size=32, test_examples=40, seed=0)
    content = trained(data, tmp_path, 150, generate=True)
    forced, generated = (column(content, "exact_match", key) for key in ("rows", "generated"))
    assert list(forced) == list(generated) == [n for n in range(1, 9) if n not in content["skipped"]]
    for n, row in forced.items():
        assert row["block_sum"] == generated[n]["block_sum"]  # example by example
        assert row["count"] == len(row["block_sum"]) == len(data.test_sets()[n - 1])
        assert row["sum"] == sum(row["block_sum"])
        assert row["value"] == pytest.approx(row["sum"] / row["count"])
    every = [hit for row in forced.values() for hit in row["block_sum"]]
    assert 0 < sum(every) < len(every)  # or agreement would say nothing
    for n, row in column(content, "token_accuracy", "generated").items():
        assert row["count"] == sum(row["block_count"]) == (n + 1) * forced[n]["count"]
        assert row["value"] >= forced[n]["value"]
    assert (content["task"], content["strategy"], content["train_length"]) == ("repeated copy", "NoPE", 4)

    events = EventAccumulator(str(content["directory"]), {"images": 0, "scalars": 0}).Reload()
    assert "test/accuracy" in events.Tags()["images"]
    logged = events.Scalars("test/exact_match/teacher_forced/5")[0].value
    assert logged == pytest.approx(forced[5]["value"])


@pytest.mark.filterwarnings("ignore")
def test_two_operands_have_a_map_and_a_scratchpad_a_final_answer(tmp_path: Path) -> None:
    data = TaskData(Addition(scratchpad=True), 60, train_length=2, batch_size=8, test_examples=6)
    content = trained(data, tmp_path, 2, generate=True)
    assert (content["directory"] / "accuracy_map.png").stat().st_size > 0
    assert {row["metric"] for row in content["rows"]} == {"exact_match", "token_accuracy", "accuracy"}


@pytest.mark.filterwarnings("ignore")
def test_lengths_a_strategy_cannot_reach_are_skipped(tmp_path: Path) -> None:
    data = TaskData(Parity(), 12, train_length=8, batch_size=8, test_examples=4)
    content = trained(data, tmp_path, 2, position="Learned")
    assert 9 in column(content, "exact_match")  # « 9 bits = answer: 12 inputs
    assert content["skipped"][-7:] == [10, 11, 12, 13, 14, 15, 16]


@pytest.mark.filterwarnings("ignore")
def test_a_scratchpad_may_run_on_as_far_as_the_strategy_reaches(tmp_path: Path) -> None:
    data = TaskData(Parity(scratchpad=True), 12, train_length=4, test_lengths=[3, 4, 5], batch_size=8)
    content = trained(data, tmp_path, 2, position="Learned", generate=True, slack=16)
    finals = column(content, "accuracy")
    assert list(finals) == [n for n in (3, 4) if n not in content["skipped"]]  # « 4 bits = 4 bits > bit: 11 inputs
    assert finals[4]["count"] == column(content, "exact_match")[4]["count"] > 0
    assert 5 in content["skipped"]


@pytest.mark.filterwarnings("ignore")
def test_a_strategy_that_reaches_no_test_length_has_an_empty_report(tmp_path: Path) -> None:
    data = TaskData(Addition(), 10, train_length=2, test_lengths=[8, 9], batch_size=8, test_examples=4)
    content = trained(data, tmp_path, 2, position="Learned")
    assert content["rows"] == []
    assert content["skipped"] == [8, 9]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("«12=1+2+0=3;>3»", "3"),
        ("«12=3»··", "3"),
        ("«12=1;>4>3»5»", "3"),
        ("«12=1;>3", None),
        ("«b=a:;>ab»", "ab"),
    ],
)
def test_the_final_answer_of_what_was_written(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


def test_a_right_final_answer_counts_whatever_the_steps() -> None:
    callback, data = TaskAccuracy(generate=True), TaskData(Sort(scratchpad=True), 60, train_length=3)
    examples = [e for group in data.test_sets()[1:3] for e in group][:6]
    right = [data.encode(e.text.replace(e.scratchpad, "b:;")) for e in examples]

    class Writes(torch.nn.Module):
        """Writes wrong steps and then the right answer, whatever it reads."""

        prefix_consistent = False
        positions = (type("Anywhere", (), {"max_length": None})(),)

        def forward(self, tokens: torch.Tensor, window: None = None, cache: None = None, **_: int) -> torch.Tensor:
            n = tokens.shape[1]
            following = [row[1 : n + 1] + [0] * (n + 1 - len(row)) for row in right]
            return torch.nn.functional.one_hot(torch.tensor(following), data.vocabulary).float()

    callback.examples, kind = examples, ("final", "generated")
    callback.counts = {kind: AnswerAccuracy(len(examples))}
    callback._measure_final(Writes(), collate(examples) | {"index": torch.arange(len(examples))}, 4)
    hits, asked = callback.counts[kind].compute()
    assert hits.tolist() == asked.tolist() == [1] * len(examples)
    right[0] = data.encode(examples[0].text.replace(">", ">a"))
    callback._measure_final(Writes(), collate(examples) | {"index": torch.arange(len(examples))}, 4)
    assert callback.counts[kind].compute()[0].tolist() == [1] + [2] * (len(examples) - 1)


def test_data_that_is_no_task_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    trainer.datamodule = LightningDataModule()
    with pytest.raises(ValueError, match=r"TaskAccuracy: got data \w+, expected a task"):
        TaskAccuracy().setup(trainer, None, "test")
    with pytest.raises(ValueError, match="slack: got -1"):
        TaskAccuracy(slack=-1)


def test_validation_logs_what_was_counted() -> None:
    callback, logged = TaskAccuracy(), {}
    count = AnswerAccuracy(3)  # the third example is not read
    answers, written = torch.tensor([[1, 2], [1, 2]]), torch.tensor([[1, 2], [1, 0]])
    count.update(written, answers, torch.ones(2, 2).bool(), torch.tensor([0, 1]))
    callback.examples, callback.counts = [None] * 3, {("tokens", "teacher_forced"): count}
    module = SimpleNamespace(log=lambda name, value, **_: logged.update({name: value}))
    callback.on_validation_epoch_end(None, module)
    assert logged == {"val/exact_match": 0.5, "val/token_accuracy": 0.75}


@pytest.mark.slow
def test_the_command_line_reports_the_same_on_two_devices(tmp_path: Path) -> None:
    """Through run.py, because a collective asked of one rank only would hang there and nowhere else."""
    root = Path(__file__).parents[2]

    def run(*arguments: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [sys.executable, root / "run.py", *arguments], cwd=root, env=environment, check=True, timeout=250
        )

    two = ("--trainer.accelerator=cpu", "--trainer.devices=2")
    configs = (f"--config={root}/configs/tasks/base.yaml", f"--config={root}/configs/tasks/addition.yaml")
    run("fit", *configs, f"--run_dir={tmp_path}/run", "--trainer.max_steps=2", *two)
    checkpoint = f"--ckpt_path={tmp_path}/run/checkpoints/last.ckpt"
    run("test", checkpoint, f"--run_dir={tmp_path}/one", "--data.eval_batch_size=64")
    run("test", checkpoint, f"--run_dir={tmp_path}/two", "--data.eval_batch_size=64", *two)
    found = [json.loads((tmp_path / name / "accuracy.json").read_text()) for name in ("one", "two")]
    assert found[0]["rows"] == found[1]["rows"]


def test_a_token_without_a_character_is_a_wrong_answer() -> None:
    """As those of the rows by which an embedding is padded."""
    right = list(encode("= 4"))
    assert _final_answer(right) == final_answer("= 4")
    assert _final_answer([*right, 107]) is None
