"""`TaskAccuracy`: exact match and token accuracy of a task at each problem length, its table and its figures."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from kerple.base.errors import UserError
from kerple.measure import results
from kerple.measure.drawing import panel
from kerple.measure.measure import Measure, max_length, require_capabilities
from kerple.measure.result import Result
from kerple.measure.results import ROW_COLUMNS, Row
from kerple.measure.runner import Runner
from kerple.model import Transformer
from kerple.model.generation import fill_in
from kerple.tasks.sampling import Examples, HeldOutProblems
from kerple.tasks.task import Example

TEACHER_FORCED, GENERATED = "teacher_forced", "generated"
MAX_TICKS = 12  # on an axis of the heat map


def add_answers(counts: Tensor, predictions: Tensor, targets: Tensor, scored: Tensor, index: Tensor) -> None:
    """Add the right and the scored tokens of a batch to those of each example.

    Args:
        counts: Numbers of right and of scored tokens of N examples, (2, N) int64 on the CPU.
        predictions: The token predicted for each target, (B, T) int64.
        targets: The targets, (B, T) int64.
        scored: Whether each target counts, (B, T) bool.
        index: Number of the example in each row, (B,) int64; -1 for fillers, which do not count.
    """
    batch = torch.stack([(predictions == targets) & scored, scored]).sum(2)  # (2, B)
    counts.index_add_(1, index[index >= 0].cpu(), batch[:, index >= 0].cpu())


def answer_table(examples: list[Example], counts: Tensor) -> pd.DataFrame:
    """Table of the examples that were measured.

    Args:
        examples: N examples.
        counts: What `add_answers` counted, (2, N).

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


@dataclass
class TaskAccuracy(Measure):
    """Measures exact match and token accuracy at every test length, by one or two protocols.

    ``teacher_forced`` takes the likeliest token at every scored position, given the right answer before it. It costs
    one forward pass, and its exact match is that of greedy decoding, because the first mistake is one in both. (Under
    a strategy whose logits depend on later tokens, such as RoPE with dynamic NTK, they differ: use ``generate``.)
    ``generated`` lets the model write the answer greedily, through the cache.

    Its text is a `kerple.tasks.sampling.Examples`. The protocol of its sums is the task's name, so that each task is a
    column of a report, and ``<task> generated`` for what the model wrote itself. It draws a figure against length, and
    a heat map if the task has two sizes. After each validation it gives ``exact_match`` and ``token_accuracy``.

    Args:
        generate: Whether to measure ``generated`` too.
    """

    generate: bool = False

    name: ClassVar[str] = "accuracy"
    needs: ClassVar[tuple[type, ...]] = (Transformer,)

    def check(self, network: Any, text: Any) -> None:
        require_capabilities(self, network, *self.needs)
        self.check_validation(text)

    def check_validation(self, text: Any) -> None:
        if not isinstance(text, Examples):
            raise UserError(f"TaskAccuracy: got data {type(text).__name__}, expected TaskData")

    @property
    def validates(self) -> bool:
        return True

    def validate(self, network: Any, text: Examples, runner: Runner) -> dict[str, float]:
        table = self._tables(network, text, runner, [TEACHER_FORCED])[TEACHER_FORCED]
        if not len(table):
            return {}
        token_accuracy = float(table["right"].sum() / table["scored"].sum())
        return {"exact_match": float(table["exact"].mean()), "token_accuracy": token_accuracy}

    def measure(self, network: Any, text: Examples, runner: Runner) -> Result:
        task, trained, title = text.task, text.training_length, f"{text.task.name}, {network.name}"
        protocols = [TEACHER_FORCED, GENERATED] if self.generate else [TEACHER_FORCED]
        tables = self._tables(network, text, runner, protocols)
        labels = {TEACHER_FORCED: task.name, GENERATED: f"{task.name} generated"}
        result, lines = Result(self.name), []
        for name, table in tables.items():
            rows = result_rows(labels[name], table)
            result.sums += rows
            cells = results.totals(pd.DataFrame(rows, columns=ROW_COLUMNS))
            names = cells["metric"] + f"/{name}/" + cells["length"].astype(str)
            result.scalars |= dict(zip(names, cells["value"], strict=True))
        answers = tables[TEACHER_FORCED]
        untested = sorted(set(text.lengths) - set(answers["length"]))
        reason = "no problems held out or beyond the strategy's last position"
        skipped = [{"protocol": task.name, "length": length, "reason": reason} for length in untested]
        result.about = {"strategy": network.name, "training_length": trained, "precision": runner.precision}
        result.about |= {"skipped": skipped}
        if untested:
            lines.append(f"not tested, {reason}: {untested}")
        if len(answers):
            exact = {name: 100 * table.groupby("length")["exact"].mean() for name, table in tables.items()}
            curves = pd.DataFrame(exact)
            lines.append(f"{title}: exact match (%)\n{range_table(curves, trained)}")
            result.figures[self.name] = against_length(curves, trained, title)
            if len(task.axes) > 1:
                cells = answers.pivot_table("exact", "row", "column")
                cells = cells.rename_axis(index=task.axes[-2], columns=task.axes[-1])
                heading = f"{title}: teacher-forced exact match"
                result.figures["accuracy_map"] = exact_match_map(cells, trained, heading)
        result.report = "\n".join(lines)
        return result

    def _tables(
        self, network: Transformer, text: Examples, runner: Runner, protocols: list[str]
    ) -> dict[str, pd.DataFrame]:
        """The table of answers by each protocol, of the examples that the strategy can represent."""
        examples, limit = [example for group in text.groups for example in group], max_length(network)
        counts = {protocol: torch.zeros(2, len(examples), dtype=torch.int64) for protocol in protocols}
        problems = HeldOutProblems(text.groups, text.batch_size, runner.rank, runner.processes)
        for number in runner.progress(range(len(problems))):
            batch = problems[number]
            tokens, scored, index = (batch[name].to(runner.device) for name in ("tokens", "scored", "index"))
            if limit is not None and scored.shape[1] > limit:
                continue
            with runner.autocast():
                for protocol, count in counts.items():
                    if protocol == GENERATED:
                        predictions = fill_in(network, tokens, scored)[:, 1:]  # (B, T)
                    else:
                        predictions = network(tokens[:, :-1]).argmax(-1)  # (B, T)
                    add_answers(count, predictions, tokens[:, 1:], scored, index)
        return {p: answer_table(examples, runner.sum(count.to(runner.device))) for p, count in counts.items()}


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


def exact_match_map(cells: pd.DataFrame, train_length: int, title: str) -> Figure:
    """Draw exact match as a heat map over two sizes; a frame marks the training lengths.

    Args:
        cells: Fraction of exact matches by two sizes, whose names are those of its index and its columns. Cells without
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
