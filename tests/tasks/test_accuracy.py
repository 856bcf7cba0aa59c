import pytest
import torch
from torch import Tensor, nn

from kerple.model.generation import fill_in
from kerple.tasks import Addition, AssociativeRecall, Copy, ModularSum, Parity, Sort, Task, TaskData
from kerple.tasks.accuracy import Accuracy, AnswerAccuracy, grouped
from kerple.tasks.batches import collate
from kerple.tasks.task_accuracy import result_rows
from kerple.tasks.vocabulary import CHARACTERS


class Oracle(nn.Module):
    """A network that knows the sequences by heart, and says something else after a share of all prefixes."""

    prefix_consistent = False

    def __init__(self, sequences: list[list[int]], mistakes: float = 0.0) -> None:
        super().__init__()
        self.next = {tuple(s[:i]): s[i] for s in sequences for i in range(1, len(s))}
        self.mistakes = mistakes
        self.positions = [type("Anywhere", (), {"max_length": None})()]

    def forward(self, tokens: Tensor, window: None = None, cache: None = None, last: int | None = None) -> Tensor:
        rows = [[self.after(tuple(row[: i + 1])) for i in range(len(row))] for row in tokens.tolist()]
        return nn.functional.one_hot(torch.tensor(rows), len(CHARACTERS)).float()

    def after(self, prefix: tuple[int, ...]) -> int:
        right = self.next.get(prefix, 5)
        wrong = hash(prefix) % 1000 < 1000 * self.mistakes  # of integers: the same in every process
        return (right + 1) % len(CHARACTERS) if wrong else right


def measured(network: nn.Module, data: TaskData, generate: bool) -> tuple[Tensor, Tensor]:
    examples = [example for group in data.test_sets() for example in group]
    count = AnswerAccuracy(len(examples))
    for batch in data.test_dataloader():
        tokens, scored = batch["tokens"], batch["scored"]
        chosen = fill_in(network, tokens, scored)[:, 1:] if generate else network(tokens[:, :-1]).argmax(-1)
        count.update(chosen, tokens[:, 1:], scored, batch["index"])
    return count.compute()


def held_out(task: Task) -> TaskData:
    return TaskData(task, 200, train_length=6, test_lengths=[3, 6, 7], test_examples=25)


TASKS = [Copy(), Addition(), Sort(digits=2, scratchpad=True), AssociativeRecall()]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_who_is_handed_the_answer_gets_everything_right(task: Task) -> None:
    data = held_out(task)
    network = Oracle([example.tokens() for group in data.test_sets() for example in group])
    for generate in (False, True):
        right, asked = measured(network, data, generate)
        assert right.tolist() == asked.tolist()
        assert asked.min() > 0


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_teacher_forced_and_generated_exact_match_agree(task: Task) -> None:
    data = held_out(task)
    network = Oracle([example.tokens() for group in data.test_sets() for example in group], mistakes=0.08)
    forced, generated = (measured(network, data, generate) for generate in (False, True))
    exact = [right == asked for right, asked in (forced, generated)]
    assert exact[0].tolist() == exact[1].tolist()
    assert 0 < exact[0].sum() < len(exact[0])
    assert generated[0].sum() < forced[0].sum()  # after a mistake the oracle is lost: token accuracies differ


@pytest.mark.parametrize(("task", "chance"), [(Parity(), 1 / 2), (ModularSum(), 1 / 10)], ids=["parity", "sum"])
def test_shuffled_answers_are_near_chance(task: Task, chance: float) -> None:
    data = TaskData(task, 200, train_length=6, test_lengths=[20], test_examples=1500, eval_batch_size=1500)
    (batch,) = data.test_dataloader()
    tokens, count = batch["tokens"], AnswerAccuracy(1500)
    shuffled = tokens[torch.randperm(1500, generator=torch.Generator().manual_seed(0))]
    count.update(shuffled[:, 1:], tokens[:, 1:], batch["scored"], batch["index"])
    ((_, accuracy),) = grouped(*count.compute(), [()] * 1500).items()
    assert accuracy.exact_match == pytest.approx(chance, abs=4 * (chance * (1 - chance) / 1500) ** 0.5)
    assert accuracy.token_accuracy == pytest.approx((accuracy.exact_match + 1) / 2)  # the end token is always right


def test_counting_by_hand() -> None:
    targets = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 1, 1]])
    chosen = torch.tensor([[1, 2, 3], [4, 0, 6], [0, 8, 9], [1, 1, 1]])
    scored = torch.tensor([[0, 1, 1], [1, 1, 1], [0, 1, 0], [1, 1, 1]]).bool()
    count = AnswerAccuracy(4)
    count.update(chosen, targets, scored, torch.tensor([2, 0, 1, -1]))  # the last row is a filler
    right, asked = count.compute()
    assert right.tolist() == [2, 1, 2, 0]
    assert asked.tolist() == [3, 1, 2, 0]
    found = grouped(right, asked, [(5,), (5,), (7,), (8,)])
    assert found == {(5,): Accuracy(0.5, 0.75, 2, 4), (7,): Accuracy(1.0, 1.0, 1, 2)}


def test_padding_is_never_scored() -> None:
    data = held_out(Addition())
    batch = collate([example for group in data.test_sets() for example in group])
    assert not (batch["scored"] & (batch["tokens"][:, 1:] == 0)).any()


def test_a_single_example_is_counted_too() -> None:
    metric = AnswerAccuracy(1)
    metric.update(torch.ones(1, 2).long(), torch.ones(1, 2).long(), torch.ones(1, 2).bool(), torch.zeros(1).long())
    assert grouped(*metric.compute(), [(3,)])[(3,)].exact_match == 1
    assert [row["block_sum"] for row in result_rows("copy", "tokens", *metric.compute(), [(3,)])] == [[1], [2]]
