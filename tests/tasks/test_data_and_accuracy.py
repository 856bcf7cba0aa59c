"""Accuracies of given predictions and of trained networks, and the problems of `TaskData`."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kerple.base.errors import UserError
from kerple.data.loader import TrainingLoader
from kerple.measure import results_table
from kerple.measure.task_accuracy import TaskAccuracy, add_answers, answer_table, result_rows
from kerple.model import Transformer
from kerple.positions import Shape, strategies
from kerple.tasks import Addition, Copy, Example, Multiplication, Parity, Reverse, TaskData, VariableChain
from kerple.tasks.vocabulary import ids_to_characters
from kerple.training.language_model import LanguageModel
from tests.toy import trainer


def test_accuracies_equal_those_counted_by_hand():
    targets = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 1, 1]])
    predictions = torch.tensor([[1, 2, 3], [4, 0, 6], [0, 8, 9], [1, 1, 1]])
    scored = torch.tensor([[0, 1, 1], [1, 1, 1], [0, 1, 0], [1, 1, 1]]).bool()
    counts = torch.zeros(2, 4, dtype=torch.int64)
    add_answers(counts, predictions, targets, scored, torch.tensor([2, 0, 1, -1]))  # the last row is padding
    assert counts.tolist() == [[2, 1, 2, 0], [3, 1, 2, 0]]
    examples = [Example("", "", sizes) for sizes in [(5,), (5,), (7,), (8,)]]  # length 8 was not evaluated
    cells = results_table.totals(pd.DataFrame(result_rows("copy", answer_table(examples, counts))))
    assert sorted(zip(cells["metric"], cells["length"], cells["value"], strict=True)) == [
        ("exact_match", 5, 0.5), ("exact_match", 7, 1.0), ("token_accuracy", 5, 0.75), ("token_accuracy", 7, 1.0),
    ]  # fmt: skip


def trained(data: TaskData, directory: Path, steps: int, position: str = "NoPE", **options: Any) -> tuple[Any, Any]:
    """Return the table of sums and the metadata of a test after a fit."""
    sizes = {"layers": 2, "dim": 32, "heads": 2, "lr": 1e-2, "warmup": 0.1}
    model = LanguageModel(strategies()[position], data.vocabulary, data.length, **sizes)
    validation = {"check_val_every_n_epoch": None, "val_check_interval": steps, "num_sanity_val_steps": 0}
    steps = {"max_steps": steps, "gradient_clip_val": 1.0, "enable_checkpointing": False}
    run = trainer(directory, TaskAccuracy(**options), events=True, **steps, **validation)
    run.fit(model, data)
    run.test(model, data, verbose=False)
    table, about = results_table.read(directory)
    return table, about["evaluations"]["accuracy"]


@pytest.mark.filterwarnings("ignore")
def test_accuracies_of_a_trained_model_by_length_and_protocol(tmp_path):
    data = TaskData(Copy(repeated=True), 10, train_length=4, batch_size=32, test_examples=40, seed=0)
    table, about = trained(data, tmp_path, 80, generate=True)
    assert about["protocols"] == ["repeated copy", "repeated copy generated"]
    assert (about["strategy"], about["training_length"]) == ("NoPE", 4)
    exact = table[table["metric"] == "exact_match"].set_index(["length", "block"])
    forced, generated = (exact[exact["protocol"] == protocol]["sum"] for protocol in about["protocols"])
    pd.testing.assert_series_equal(forced, generated)  # equal for each example
    skipped = [cell["length"] for cell in about["skipped"]]
    counts = {n: len(data.test_problems[n - 1]) for n in range(1, 9) if n not in skipped}
    assert list(forced.index) == [(n, i) for n in counts for i in range(counts[n])]
    assert 0 < forced.sum() < len(forced)  # with equal sums of 0 or 1, agreement would be trivial
    of_metric = dict(iter(results_table.totals(table).set_index("length").groupby(["metric", "protocol"])))
    forced_cells = of_metric["exact_match", "repeated copy"]
    tokens = of_metric["token_accuracy", "repeated copy generated"]
    assert tokens["count"].tolist() == ((forced_cells.index + 1) * forced_cells["count"]).tolist()
    assert (tokens["value"] >= forced_cells["value"]).all()
    events = EventAccumulator(str(tmp_path), {"images": 0, "scalars": 0}).Reload()
    assert "analyses/accuracy" in events.Tags()["images"]
    assert events.Scalars("test/exact_match/teacher_forced/5")[0].value == pytest.approx(forced_cells["value"][5])
    assert {"val/exact_match", "val/token_accuracy"} <= set(events.Tags()["scalars"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("lengths", "read"), [([1, 2, 3, 9], [1, 2]), ([8, 9], [])])
def test_lengths_beyond_the_last_position_are_skipped(tmp_path, lengths, read):
    data = TaskData(Addition(), 10, train_length=2, test_lengths=lengths, eval_batch_size=1, test_examples=40)
    table, about = trained(data, tmp_path, 2, position="Learned")
    assert sorted(set(table["length"])) == read
    assert [cell["length"] for cell in about["skipped"]] == [n for n in lengths if n not in read]
    assert (tmp_path / "accuracy_map.png").exists() == bool(read)


TWO_LENGTHS, LENGTH_AND_DIGIT = Addition(), Multiplication()  # tasks by the two sizes of their problems


@pytest.mark.parametrize(("task", "rows", "columns"), [(TWO_LENGTHS, 3, 3), (LENGTH_AND_DIGIT, 2, 10)])
def test_the_frame_of_the_map_has_the_cells_of_lengths_in_training(task, rows, columns):
    data = TaskData(task, 30, train_length=3, test_lengths=[2, 3, 5], test_examples=200)
    network = Transformer(Shape(16, 2, 60), 1, data.vocabulary, strategies()["NoPE"]).eval()
    axes = TaskAccuracy().run(network, data.text("test")).figures["accuracy_map"].axes[0]
    assert axes.lines[0].get_xydata().max(0).tolist() == [columns - 0.5, rows - 0.5]


def test_predictions_from_logits_that_are_not_finite_are_an_error():
    data, shape = TaskData(Copy(), 10, train_length=2, test_examples=2), Shape(16, 2, 10)
    network = Transformer(shape, 1, data.vocabulary, strategies()["NoPE"]).eval()
    torch.nn.init.constant_(network.embedding.weight, torch.nan)
    with pytest.raises(UserError, match="model: the logits are not finite; check the weights for NaN"):
        TaskAccuracy().run(network, data.text("test"))
    with pytest.raises(UserError, match="model: the logits are not finite"):  # Needle generates answers
        network.continued(torch.ones(1, 3, dtype=torch.int64), 1)


def loader(data: TaskData, steps: int) -> TrainingLoader:
    data.trainer = SimpleNamespace(global_rank=0, world_size=1, max_steps=steps, accumulate_grad_batches=1)
    return data.train_dataloader()


def sequences(batches: TrainingLoader) -> list[str]:
    return [ids_to_characters(row) for batch in batches for row in batch["tokens"].tolist()]


def test_a_training_length_is_refused_if_a_rare_problem_is_longer():
    # 93 inputs are enough for most random problems of this length
    with pytest.raises(UserError, match=r"^data\.length: got 93, expected 94 or more for problems of the train"):
        TaskData(Addition(), 93, train_length=30, seed=1)
    TaskData(Addition(), 94, train_length=30, seed=1)
    longest = Example("99+99", "198", (2,))
    assert len(longest.tokens()) - 1 == Addition().most_inputs(2)


def test_training_lengths_are_uniform():
    data, draws = TaskData(Reverse(), 100, train_length=10), 5_000
    counts = np.bincount([data.sampler.training_problem(3, i).sizes[0] for i in range(draws)], minlength=11)
    assert counts[0] == 0
    assert ((counts[1:] - draws / 10) ** 2 / (draws / 10)).sum() < 27.9  # χ², 9 degrees: p > 0.001


@pytest.mark.parametrize("task", [Copy(symbols=3), Addition(), VariableChain()], ids=lambda task: task.name)
def test_splits_have_no_common_problem(task):
    data = TaskData(task, 200, train_length=4, test_lengths=list(range(1, 9)), validation_examples=200)
    trained = {data.sampler.training_problem(0, i).identity for i in range(2000)}
    tested = {example.identity for group in data.test_problems for example in group}
    validated = {example.identity for example in data.validation_problems}
    assert min(len(tested), len(validated)) > 0
    assert not (trained & (tested | validated) | tested & validated)
    whole = {task.example(n, np.random.default_rng(i)).identity for n in range(1, 5) for i in range(500)}
    assert whole & tested  # some test problems have training lengths


def test_each_problem_of_a_small_space_is_tested_once():
    data = TaskData(Parity(), 100, train_length=6, test_lengths=[1, 2, 6, 7])
    groups = dict(zip(data.lengths, data.test_problems, strict=True))
    for n, group in groups.items():
        every, split_of = [format(i, f"0{n}b") for i in range(2**n)], data.sampler.split_of
        held_out = every if n > 6 else [bits for bits in every if split_of(Example(bits, "", (n,))) == "test"]
        assert {e.prompt for e in group} <= set(held_out)
        assert len({e.prompt for e in group}) == len(group) == min(len(held_out), 100)
    assert not groups[1]
    with pytest.raises(UserError, match=r"data.test_lengths: got \[1\], which have no test problem, expected a length"):
        TaskData(Parity(), 100, train_length=6, test_lengths=[1]).test_dataloader()


def test_repeated_examples_have_another_order_in_each_epoch():
    data, other = (TaskData(Copy(), 100, batch_size=5, examples=20, seed=seed) for seed in (5, 6))
    run = sequences(loader(data, steps=8))
    epochs = loader(data, steps=-1)  # without a number of steps, an epoch has all examples once
    first, second = sequences(epochs), sequences(epochs)
    assert run == first + second
    assert sorted(first) == sorted(second)
    assert first != second
    assert run != sequences(loader(other, steps=8))
