"""`TaskAccuracy`: exact match and token accuracy of a task at each problem length, its table and its figures."""

from itertools import chain, pairwise
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric

from kerple.base.errors import UserError
from kerple.evaluation import results
from kerple.evaluation.analysis import publish
from kerple.evaluation.figures import panel
from kerple.evaluation.results import COLUMNS, Row
from kerple.evaluation.typed import data_of, log_directory, max_positions, network_of, refuse_shards, strategy_name
from kerple.model.generation import fill_in
from kerple.tasks.base import Example
from kerple.tasks.datamodule import TaskData

TEACHER_FORCED, GENERATED = "teacher_forced", "generated"
MAX_TICKS = 12  # on an axis of the heat map


class AnswerAccuracy(Metric):
    """Counts the scored and the right tokens of each example, and adds them over devices.

    Args:
        examples: Number of examples N.
    """

    right: Tensor
    scored: Tensor

    def __init__(self, examples: int) -> None:
        super().__init__()
        for state in ("right", "scored"):
            self.add_state(state, torch.zeros(examples, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, predictions: Tensor, targets: Tensor, scored: Tensor, index: Tensor) -> None:
        """Count a batch.

        Args:
            predictions: The token predicted for each target, (B, T) int64.
            targets: The targets, (B, T) int64.
            scored: Whether each target counts, (B, T) bool.
            index: Number of the example in each row, (B,) int64; -1 for fillers, which do not count.
        """
        real = index >= 0
        right = ((predictions == targets) & scored).sum(1)  # (B,)
        self.right.index_add_(0, index[real], right[real])
        self.scored.index_add_(0, index[real], scored.sum(1)[real])

    def compute(self) -> Tensor:
        """Numbers of right and of scored tokens of each example, (2, N) int64; 0 for examples that were not seen."""
        return torch.stack([self.right, self.scored])


def answer_table(examples: list[Example], counts: Tensor) -> pd.DataFrame:
    """Table of the examples that were measured.

    Args:
        examples: N examples.
        counts: What `AnswerAccuracy` counted, (2, N).

    Returns:
        A row for each example, with columns ``length``, the last two of its sizes as ``row`` and ``column``, numbers of
        ``right`` and of ``scored`` tokens, ``exact``, which is 1 if all are right and else 0, and ``block``, its number
        among the examples of its length.
    """
    table = pd.DataFrame(
        {
            "length": [example.sizes[0] for example in examples],
            "row": [example.sizes[-2:][0] for example in examples],
            "column": [example.sizes[-1] for example in examples],
            "right": counts[0].tolist(),
            "scored": counts[1].tolist(),
        }
    )
    table["exact"] = (table["right"] == table["scored"]).astype(int)
    table["block"] = table.groupby("length").cumcount()
    return table[table["scored"] > 0]


def result_rows(protocol: str, table: pd.DataFrame) -> list[Row]:
    """Rows of results: exact match and token accuracy of each example.

    Args:
        protocol: Name of the protocol in the rows.
        table: What `answer_table` returns.
    """
    rows, columns = [], ["length", "block", "exact", "right", "scored"]
    for length, block, exact, right, scored in table[columns].to_numpy().tolist():
        rows.append(Row("exact_match", protocol, length, None, block, exact, 1))
        rows.append(Row("token_accuracy", protocol, length, None, block, right, scored))
    return rows


class TaskAccuracy(Callback):
    """Measures exact match and token accuracy at every test length, by one or two protocols.

    ``teacher_forced`` takes the likeliest token at every scored position, given the right answer before it. It costs
    one forward pass, and its exact match is that of greedy decoding, because the first mistake is one in both. (Under
    a strategy whose logits depend on later tokens, such as RoPE with dynamic NTK, they differ: use ``generate``.)
    ``generated`` lets the model write the answer greedily, through the cache.

    Adds both for each example to the results of the test (`kerple.evaluation.results`). The protocol of these rows is
    the task's name, so that each task is a column of a report, and ``<task> generated`` for what the model wrote
    itself. Prints a table, and writes a figure against length, and a heat map if the task has two sizes, also to
    TensorBoard. During `fit` it logs ``val/exact_match`` and ``val/token_accuracy``.

    Args:
        generate: Whether to measure ``generated`` too.

    Raises:
        UserError: If the data is not a task.
    """

    def __init__(self, generate: bool = False) -> None:
        super().__init__()
        self.generate = generate
        self.examples: list[Example] = []
        self.counts: dict[str, AnswerAccuracy] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        refuse_shards(trainer, "TaskAccuracy", "leave it out of the fit")
        data = data_of(trainer)
        if not isinstance(data, TaskData):
            raise UserError(
                f"TaskAccuracy: got data {type(data).__name__}, expected a task; use data TaskData, or drop this "
                "callback"
            )

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start(pl_module, data_of(trainer).validation_problems, [TEACHER_FORCED])

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        examples = [example for group in data_of(trainer).test_problems for example in group]
        self._start(pl_module, examples, [TEACHER_FORCED, GENERATED] if self.generate else [TEACHER_FORCED])

    def _start(self, pl_module: LightningModule, examples: list[Example], protocols: list[str]) -> None:
        self.examples = examples
        self.counts = {protocol: AnswerAccuracy(len(examples)).to(pl_module.device) for protocol in protocols}

    @torch.no_grad()
    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: dict[str, Tensor],
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        network, tokens, scored = network_of(pl_module), batch["tokens"], batch["scored"]  # (B, T + 1), (B, T)
        if scored.shape[1] > max_positions(network):  # the strategy cannot represent these examples
            return
        with trainer.precision_plugin.forward_context():
            for protocol, count in self.counts.items():
                if protocol == GENERATED:
                    predictions = fill_in(network, tokens, scored)[:, 1:]  # (B, T)
                else:
                    predictions = network(tokens[:, :-1]).argmax(-1)  # (B, T)
                count.update(predictions, tokens[:, 1:], scored, batch["index"])

    on_validation_batch_end = on_test_batch_end

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        table = answer_table(self.examples, self.counts[TEACHER_FORCED].compute())
        if len(table):
            pl_module.log("val/exact_match", table["exact"].mean(), prog_bar=True, rank_zero_only=True)
            token_accuracy = table["right"].sum() / table["scored"].sum()
            pl_module.log("val/token_accuracy", token_accuracy, rank_zero_only=True)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data: TaskData = data_of(trainer)
        task, strategy, training = data.task, strategy_name(pl_module), data.train_length
        title, directory = f"{task.name}, {strategy}", log_directory(trainer)
        tables = {name: answer_table(self.examples, count.compute()) for name, count in self.counts.items()}
        labels = {TEACHER_FORCED: task.name, GENERATED: f"{task.name} generated"}
        rows = {name: result_rows(labels[name], table) for name, table in tables.items()}
        for name, protocol_rows in rows.items():
            cells = results.totals(pd.DataFrame(protocol_rows, columns=COLUMNS))
            names = "test/" + cells["metric"] + f"/{name}/" + cells["length"].astype(str)
            for logger in trainer.loggers:
                logger.log_metrics(dict(zip(names, cells["value"], strict=True)), trainer.global_step)
        answers = tables[TEACHER_FORCED]
        untested = sorted(set(data.test_lengths) - set(answers["length"]))
        if trainer.is_global_zero:
            reason = "no problems held out or beyond the strategy's last position"
            skipped = [{"protocol": task.name, "length": length, "reason": reason} for length in untested]
            about = {"strategy": strategy, "training_length": training, "precision": str(trainer.precision)}
            results.write(directory, "accuracy", chain.from_iterable(rows.values()), about | {"skipped": skipped})
            if untested:
                print(f"not tested, {reason}: {untested}")
        if not len(answers):
            return
        curves = pd.DataFrame({name: 100 * table.groupby("length")["exact"].mean() for name, table in tables.items()})
        if trainer.is_global_zero:
            print(f"{title}: exact match (%)\n{range_table(curves, training)}")
        publish(trainer, "accuracy", against_length(curves, training, title), [])
        if len(task.axes) > 1:
            cells = answers.pivot_table("exact", "row", "column")
            cells = cells.rename_axis(index=task.axes[-2], columns=task.axes[-1])
            publish(trainer, "accuracy_map", heat_map(cells, training, f"{title}: teacher-forced exact match"), [])


def range_table(curves: pd.DataFrame, train_length: int) -> pd.DataFrame:
    """Table of the mean over the training lengths, and over four ranges of longer lengths, of the columns of curves."""
    longest = int(curves.index.max())
    width = max(1, -(-(longest - train_length) // 4))
    edges = [0, train_length, *range(train_length + width, longest + width, width)]
    ranges = pd.cut(curves.index.to_series(), edges, labels=[f"{a + 1}-{b}" for a, b in pairwise(edges)])
    return curves.groupby(ranges, observed=True).mean().round(1).rename_axis("length")


def against_length(curves: pd.DataFrame, train_length: int, title: str) -> Figure:
    """Draw exact match against length; the training lengths are shaded.

    Args:
        curves: Exact matches in per cent by length, a column for each protocol.
        train_length: Largest length of training.
        title: Title of the figure.
    """
    figure, axes = panel(6, 4)
    axes.axvspan(0.5, train_length + 0.5, color="0.92", label="lengths of training")
    for label, curve in curves.items():
        axes.plot(curve.index, curve, marker=".", label=label)
    axes.set(xlabel="length of the problem", ylabel="exact match (%)", ylim=(-3, 103), title=title)
    axes.legend(fontsize="small")
    return figure


def heat_map(cells: pd.DataFrame, train_length: int, title: str) -> Figure:
    """Draw exact match as a heat map over two sizes; a frame marks the training lengths.

    Args:
        cells: Share of exact matches by two sizes, whose names are those of its index and its columns. Cells without
            test problems are NaN and stay white.
        train_length: Largest length of training.
        title: Title of the figure.
    """
    figure, axes = panel(6, 5)
    image = axes.imshow(100 * cells, origin="lower", vmin=0, vmax=100, cmap="viridis", aspect="auto")
    for axis, sizes in ((axes.xaxis, cells.columns), (axes.yaxis, cells.index)):
        ticks = range(0, len(sizes), -(-len(sizes) // MAX_TICKS))
        axis.set_ticks(ticks, [str(sizes[i]) for i in ticks])
    top, right = (np.sum(sizes.to_numpy() <= train_length) - 0.5 for sizes in (cells.index, cells.columns))
    axes.plot([-0.5, right, right], [top, top, -0.5], color="red", linewidth=1)
    axes.set(xlabel=cells.columns.name, ylabel=cells.index.name, title=title)
    figure.colorbar(image, label="exact match (%)")
    return figure
