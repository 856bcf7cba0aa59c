"""`TaskAccuracy`: exact match and token accuracy of a task at each problem length."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import TensorBoardLogger
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kerple.base.errors import UserError
from kerple.evaluation.analysis import log_directory, strategy_name
from kerple.evaluation.results import reach
from kerple.evaluation.typed import data_of, network_of, refuse_shards
from kerple.model import Transformer
from kerple.model.generation import fill_in
from kerple.tasks import Example, TaskData
from kerple.tasks.accuracy import Accuracy, AnswerAccuracy, grouped
from kerple.tasks.accuracy_figures import against_length, heat_map
from kerple.tasks.vocabulary import END, decode

TEACHER_FORCED, GENERATED = "teacher_forced", "generated"
TOKENS, FINAL = "tokens", "final"


class TaskAccuracy(Callback):
    """Measures exact match and token accuracy at every test length, by one or two protocols.

    ``teacher_forced`` takes the likeliest token at every scored position, given the right answer before it. It costs
    one forward pass, and its exact match is that of greedy decoding, because the first mistake is one in both. (Under
    a strategy whose logits depend on later tokens, such as RoPE with dynamic NTK, they differ: use ``generate``.)
    ``generated`` lets the model write the answer greedily, through the cache. For tasks with a scratchpad it also
    measures ``accuracy``, for which the final answer has to be right, but not the steps before it.

    Writes ``accuracy.json`` into the run's log directory. Its ``rows`` have metric, protocol (the task's name, so that
    each task is a column of a report), length, value, sum, count and the parts of both for each example; ``generated``
    has such rows for what the model wrote itself. Prints a table, and writes a figure against length, and a heat map if
    the task has two sizes, also to TensorBoard. During `fit` it logs ``val/exact_match`` and ``val/token_accuracy``.

    Args:
        generate: Whether to measure ``generated`` too.
        slack: Number of tokens that the model may write beyond the length of the right answer before it counts as
            wrong. It matters only with a scratchpad, and never goes beyond the last position of the strategy.

    Raises:
        UserError: If the data is not a task, or slack is negative.
    """

    def __init__(self, generate: bool = False, slack: int = 16) -> None:
        super().__init__()
        if slack < 0:
            raise UserError(f"TaskAccuracy: slack: got {slack}, expected 0 or more tokens")
        self.generate, self.slack = generate, slack
        self.examples: list[Example] = []
        self.counts: dict[tuple[str, str], AnswerAccuracy] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        data = data_of(trainer)
        if not isinstance(data, TaskData):
            raise UserError(
                f"TaskAccuracy: got data {type(data).__name__}, expected a task; use data TaskData, or drop this "
                "callback"
            )

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        refuse_shards(trainer, "TaskAccuracy", "leave it out of the fit")
        self._start(pl_module, data_of(trainer).validation_set(), [TEACHER_FORCED])

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        examples = [example for group in data_of(trainer).test_sets() for example in group]
        self._start(pl_module, examples, [TEACHER_FORCED, *([GENERATED] if self.generate else [])])

    def _start(self, pl_module: LightningModule, examples: list[Example], protocols: list[str]) -> None:
        self.examples = examples
        kinds = [(TOKENS, protocol) for protocol in protocols]
        if GENERATED in protocols and any(example.scratchpad for example in examples):
            kinds.append((FINAL, GENERATED))
        self.counts = {kind: AnswerAccuracy(len(examples)).to(pl_module.device) for kind in kinds}

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: dict[str, Tensor], *_: Any
    ) -> None:
        self._measure(trainer, network_of(pl_module), batch)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: dict[str, Tensor], *_: Any
    ) -> None:
        self._measure(trainer, network_of(pl_module), batch)

    @torch.no_grad()
    def _measure(self, trainer: Trainer, network: Transformer, batch: dict[str, Tensor]) -> None:
        tokens, scored, index = batch["tokens"], batch["scored"], batch["index"]
        bound = reach(network)
        if bound is not None and scored.shape[1] > bound:  # the strategy cannot represent these examples
            return
        with trainer.precision_plugin.forward_context():
            likeliest = network(tokens[:, :-1]).argmax(-1)  # (B, T)
            self.counts[TOKENS, TEACHER_FORCED].update(likeliest, tokens[:, 1:], scored, index)
            if (TOKENS, GENERATED) in self.counts:
                written = fill_in(network, tokens, scored)  # (B, T + 1)
                self.counts[TOKENS, GENERATED].update(written[:, 1:], tokens[:, 1:], scored, index)
            if (FINAL, GENERATED) in self.counts:
                slack = self.slack if bound is None else min(self.slack, bound - scored.shape[1])
                self._measure_final(network, batch, slack)

    def _measure_final(self, network: Transformer, batch: dict[str, Tensor], slack: int) -> None:
        room = F.pad(batch["tokens"], (0, slack))  # (B, T + 1 + slack)
        free = F.pad(batch["scored"], (0, slack)).cummax(1).values  # from the answer's start to the end
        written = fill_in(network, room, free)
        right = [
            i >= 0 and _final_answer(row) == self.examples[i].answer
            for row, i in zip(written.tolist(), batch["index"].tolist(), strict=True)
        ]
        found = torch.tensor(right, device=written.device)[:, None]  # (B, 1): one target per example
        self.counts[FINAL, GENERATED].update(found.long(), torch.ones_like(found).long(), found | True, batch["index"])

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        everything = [()] * len(self.examples)
        for accuracy in grouped(*self.counts[TOKENS, TEACHER_FORCED].compute(), everything).values():
            pl_module.log("val/exact_match", accuracy.exact_match, prog_bar=True, rank_zero_only=True)
            pl_module.log("val/token_accuracy", accuracy.token_accuracy, rank_zero_only=True)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        counted = {kind: metric.compute() for kind, metric in self.counts.items()}
        directory = log_directory(trainer)
        if trainer.is_global_zero:
            self._report(trainer, pl_module, directory, counted)

    def _report(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        directory: Path,
        counted: dict[tuple[str, str], tuple[Tensor, Tensor]],
    ) -> None:
        data: TaskData = data_of(trainer)
        strategy = strategy_name(pl_module)
        lengths = [example.sizes[:1] for example in self.examples]
        curves = {kind: grouped(*both, lengths) for kind, both in counted.items()}
        rows = {kind: result_rows(data.task.name, kind[0], *both, lengths) for kind, both in counted.items()}
        skipped = sorted(set(data.test_lengths) - {n for (n,) in curves[TOKENS, TEACHER_FORCED]})
        content = {
            "task": data.task.name,
            "strategy": strategy,
            "train_length": data.train_length,
            "skipped": skipped,
            "precision": str(trainer.precision),
            "rows": rows[TOKENS, TEACHER_FORCED] + rows.get((FINAL, GENERATED), []),
            "generated": rows.get((TOKENS, GENERATED), []),
        }
        (directory / "accuracy.json").write_text(json.dumps(content) + "\n")
        scalars = {
            f"test/{row['metric']}/{protocol}/{row['length']}": row["value"]
            for (_, protocol), found in rows.items()
            for row in found
        }
        shown = {protocol: curve for (what, protocol), curve in curves.items() if what == TOKENS}
        figures = {}
        if rows[TOKENS, TEACHER_FORCED]:
            figures["accuracy"] = against_length(shown, data.train_length, f"{data.task.name}, {strategy}")
        if figures and len(data.task.axes) > 1:
            pairs = [example.sizes[-2:] for example in self.examples]
            cells = grouped(*counted[TOKENS, TEACHER_FORCED], pairs)
            title = f"{data.task.name}, {strategy}: teacher-forced exact match"
            figures["accuracy_map"] = heat_map(cells, data.task.axes[-2:], data.train_length, title)
        for name, figure in figures.items():
            figure.savefig(directory / f"{name}.png", dpi=150)
        for logger in trainer.loggers:
            logger.log_metrics(scalars, trainer.global_step)
            if isinstance(logger, TensorBoardLogger):
                for name, figure in figures.items():
                    logger.experiment.add_figure(f"test/{name}", figure, global_step=trainer.global_step)
        if figures:
            Console().print(_table(f"{data.task.name}, {strategy}", curves, data.train_length))
        if skipped:
            Console().print(f"not tested, no problems held out or beyond the strategy's reach: {skipped}")


def final_answer(text: str) -> str | None:
    """The text between the last ``>`` of a written sequence and its end token; None if it has no end token."""
    written = text.partition("=")[2]
    if END not in written:
        return None
    return written.partition(END)[0].rpartition(">")[2]


def result_rows(
    protocol: str, what: str, right: Tensor, asked: Tensor, lengths: list[tuple[int, ...]]
) -> list[dict[str, Any]]:
    """Rows of results, one for each metric and length.

    Args:
        protocol: Name of the protocol in the rows.
        what: ``tokens`` for exact match and token accuracy, ``final`` for the accuracy of final answers.
        right: Number of right targets in each example, (examples,) int64.
        asked: Number of scored targets in each example, (examples,) int64; 0 for one that was not tested.
        lengths: The length of each example.
    """
    right, asked = right.reshape(-1), asked.reshape(-1)  # torchmetrics returns a scalar for a single example
    rows = []
    for (length,), accuracy in grouped(right, asked, lengths).items():
        members = [i for i, key in enumerate(lengths) if key == (length,) and asked[i] > 0]
        exact, hits, targets = (right == asked)[members].int(), right[members], asked[members]
        found = [("exact_match", accuracy.exact_match, exact, torch.ones_like(exact))]
        found.append(("token_accuracy", accuracy.token_accuracy, hits, targets))
        if what == FINAL:
            found = [("accuracy", accuracy.exact_match, exact, torch.ones_like(exact))]
        rows += [
            {
                "metric": metric,
                "protocol": protocol,
                "length": length,
                "value": value,
                "sum": int(sums.sum()),
                "count": int(counts.sum()),
                "block_sum": sums.tolist(),
                "block_count": counts.tolist(),
            }
            for metric, value, sums, counts in found
        ]
    return rows


def _table(title: str, curves: dict[tuple[str, str], dict[tuple[int, ...], Accuracy]], train_length: int) -> Table:
    """Table of the mean accuracy over the training lengths, and over four ranges of longer lengths."""
    table = Table(title=title)
    table.add_column("length")
    table.add_column("problems", justify="right")
    for what, protocol in curves:
        table.add_column(f"{'final answer' if what == FINAL else 'exact match'} (%), {protocol}", justify="right")
    longest = max(n for curve in curves.values() for (n,) in curve)
    beyond = max(1, -(-(longest - train_length) // 4))
    parts = [(1, train_length)] + [(a, a + beyond - 1) for a in range(train_length + 1, longest + 1, beyond)]
    for first, last in parts:
        inside = [[a for (n,), a in curve.items() if first <= n <= last] for curve in curves.values()]
        if any(inside):
            values = [f"{100 * sum(a.exact_match for a in part) / len(part):.1f}" for part in inside]
            table.add_row(f"{first}-{last}", str(sum(a.examples for a in inside[0])), *values)
    return table


def _final_answer(tokens: list[int]) -> str | None:
    """The final answer in what a model wrote; None if an id has no character, as those of padded embeddings have."""
    try:
        return final_answer(decode(tokens))
    except UserError:
        return None
