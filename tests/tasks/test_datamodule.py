from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kerple.base.errors import UserError
from kerple.tasks import Addition, Copy, Example, Parity, Reverse, Sort, Task, TaskData, VariableChain


def ranked(data: TaskData, rank: int = 0, world: int = 1, steps: int = 6, done: int = 0) -> TaskData:
    data.trainer = SimpleNamespace(
        global_rank=rank, world_size=world, max_steps=steps, accumulate_grad_batches=1, global_step=done
    )
    return data


def sequences(loader: Any) -> list[str]:
    data = TaskData(Copy(), 100)
    return [data.decode(row) for batch in loader for row in batch["tokens"].tolist()]


class Accents(Task):
    """As many letters as there are spaces, of a letter that is no token."""

    def example(self, length: int, rng: np.random.Generator) -> Example:
        return Example(prompt=" " * length, answer="é" * length, sizes=(length,))


def test_a_task_that_does_not_fit_is_told_when_it_is_made():
    with pytest.raises(UserError, match="the character 'é', expected one of"):
        TaskData(Accents(), 99, train_length=3)


def test_training_lengths_are_uniform():
    data, draws = TaskData(Reverse(), 100, train_length=10, seed=3), 5_000
    counts = np.bincount([data.sample(i).sizes[0] for i in range(draws)], minlength=11)
    assert counts[0] == 0
    assert ((counts[1:] - draws / 10) ** 2 / (draws / 10)).sum() < 27.9  # χ², 9 degrees: p > 0.001


@pytest.mark.parametrize("task", [Copy(symbols=3), Addition(), VariableChain()], ids=lambda task: task.name)
def test_no_test_or_validation_problem_is_trained_on(task):
    data = TaskData(task, 200, train_length=4, test_lengths=list(range(1, 9)), validation_examples=200)
    trained = {data.sample(i).identity for i in range(2000)}
    tested = {example.identity for group in data.test_problems for example in group}
    validated = {example.identity for example in data.validation_problems}
    assert min(len(tested), len(validated)) > 0
    assert not (trained & (tested | validated) | tested & validated)
    whole = {task.example(n, np.random.default_rng(i)).identity for n in range(1, 5) for i in range(500)}
    assert whole & tested  # or nothing of the training lengths would be tested


def test_a_small_space_is_tested_once_each():
    data = TaskData(Parity(), 100, train_length=6, test_lengths=[1, 2, 6, 7])
    groups = dict(zip(data.test_lengths, data.test_problems, strict=True))
    for n, group in groups.items():
        every = [format(i, f"0{n}b") for i in range(2**n)]
        split_of = data.sampler.split_of
        held_out = every if n > 6 else [bits for bits in every if split_of(Example(bits, "", (n,))) == "test"]
        assert {e.prompt for e in group} <= set(held_out)
        assert len({e.prompt for e in group}) == len(group) == min(len(held_out), 100)
    assert not groups[1]


def test_batches_are_padded_on_the_right_and_score_answers_only():
    data = ranked(TaskData(Sort(), 100, train_length=9, batch_size=16, seed=1))
    for batch in data.train_dataloader():
        assert batch["tokens"].dtype == torch.int64
        assert batch["scored"].dtype == torch.bool
        assert batch["tokens"].shape == (16, batch["scored"].shape[1] + 1)
        for tokens, scored in zip(batch["tokens"], batch["scored"], strict=True):
            text = data.decode(tokens.tolist())
            assert text[0] + text[-1] == "«»"
            assert data.decode(tokens[1:][scored].tolist()) == text.partition("=")[2]
            assert tokens[len(text) :].eq(0).all()


def test_the_order_is_the_same_for_any_number_of_workers():
    def batches(seed=5, workers=0):
        return sequences(ranked(TaskData(Copy(), 100, batch_size=4, seed=seed, workers=workers)).train_dataloader())

    assert batches() == batches(workers=2) != batches(seed=6)
    assert len(set(batches())) > 20


def test_repeated_examples_come_in_a_new_order_each_time():
    data = TaskData(Copy(), 100, batch_size=5, examples=20, seed=5)
    whole = sequences(ranked(data, steps=8).train_dataloader())
    loader = ranked(data, steps=-1).train_dataloader()  # without a number of steps, an epoch has all examples once
    first, second = sequences(loader), sequences(loader)
    assert whole == first + second
    assert sorted(first) == sorted(second)
    assert first != second


@pytest.mark.parametrize("world", [1, 3])
def test_every_test_example_is_seen_once_by_one_rank(world):
    found: list[int] = []
    batches = set()
    for rank in range(world):
        data = TaskData(Reverse(), 100, train_length=5, test_examples=11, eval_batch_size=4)
        loader = ranked(data, rank, world).test_dataloader()
        every = [example.text for group in data.test_problems for example in group]
        batches.add(len(list(loader)))
        assert len(loader) in batches
        for batch in loader:
            for index, tokens in zip(batch["index"].tolist(), batch["tokens"].tolist(), strict=True):
                if index >= 0:
                    found.append(index)
                    assert data.decode(tokens) == every[index]
    assert len(batches) == 1  # or ranks would wait for each other for ever
    assert sorted(found) == list(range(len(every)))


@pytest.mark.parametrize(("world", "accumulate"), [(2, 1), (1, 4)])
def test_a_state_goes_on_with_other_devices_and_accumulation(world, accumulate):
    def make(rank: int = 0, world: int = 1, batch_size: int = 4) -> TaskData:
        return ranked(TaskData(Copy(), 100, batch_size=batch_size, seed=5), rank, world, steps=12)

    whole = sequences(make(batch_size=4).train_dataloader())
    first = make(batch_size=4).train_dataloader()
    batches = iter(first)
    for _ in range(6):
        next(batches)
    loaders = [make(rank, world, 4 // accumulate).train_dataloader() for rank in range(world)]
    for loader in loaders:
        loader.load_state_dict(first.state_dict())
    parts = [iter(loader) for loader in loaders]
    got = [row for _ in range(3 * accumulate) for part in parts for row in sequences([next(part)])]
    assert got == whole[24 : 24 + len(got)]
