"""`TaskAccuracy`: exact match and token accuracy of a model on a task, at each length of the problems."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from kerple.base.errors import require
from kerple.measure import results_table
from kerple.measure.measure import Measure, length_limit, require_capabilities
from kerple.measure.plotting import panel
from kerple.measure.result import Result
from kerple.measure.results_table import ROW_COLUMNS, Row
from kerple.measure.runner import Runner
from kerple.model import Transformer
from kerple.model.generation import check_finite, fill_in
from kerple.tasks.sampling import Examples, HeldOutProblems
from kerple.tasks.task import Example

TEACHER_FORCED, GENERATED = "teacher_forced", "generated"
MAX_TICKS = 12  # on each axis of the heat map


def add_answers(counts: Tensor, predictions: Tensor, targets: Tensor, scored: Tensor, index: Tensor) -> None:
    """Count the correct and the scored tokens of each example of a batch.

    Args:
        counts: Numbers of correct and of scored tokens of N examples, (2, N) int64 on the CPU. The numbers of the batch
            are added in place.
        predictions: The predicted tokens, (B, T) int64.
        targets: The targets, (B, T) int64.
        scored: Whether each target is scored, (B, T) bool.
        index: Index of the example of each row, (B,) int64; -1 for padding rows, which are not counted.
    """
    batch_counts = torch.stack([(predictions == targets) & scored, scored]).sum(2)  # (2, B)
    counts.index_add_(1, index[index >= 0].cpu(), batch_counts[:, index >= 0].cpu())


def answer_table(examples: list[Example], counts: Tensor) -> pd.DataFrame:
    """Return a table of the examples that were scored.

    Args:
        examples: N examples.
        counts: The counts of `add_answers`, (2, N).

    Returns:
        A row for each example with scored tokens. Its columns are

        - ``length``: length of the problem;
        - ``row`` and ``column``: the last two entries of `Example.sizes`, which are the axes of the heat map;
        - ``right`` and ``scored``: numbers of correct and of scored tokens;
        - ``exact``: 1 if all scored tokens are correct, else 0;
        - ``block``: index of the example among the examples of its length.
    """
    rows = [(e.sizes[0], e.sizes[-2:][0], e.sizes[-1], *c) for e, c in zip(examples, counts.T.tolist(), strict=True)]
    table = pd.DataFrame(rows, columns=["length", "row", "column", "right", "scored"])
    table["exact"] = (table["right"] == table["scored"]).astype(int)
    table["block"] = table.groupby("length").cumcount()
    return table[table["scored"] > 0]


def result_rows(protocol: str, table: pd.DataFrame) -> list[Row]:
    """Return two rows of the results for each example: exact match and token accuracy.

    Args:
        protocol: Name of the protocol in the rows.
        table: A table of `answer_table`.
    """
    rows = []
    columns = ["length", "block", "exact", "right", "scored"]
    for length, block, exact, right, scored in table[columns].to_numpy().tolist():
        rows.append(Row("exact_match", protocol, length, None, block, exact, 1))
        rows.append(Row("token_accuracy", protocol, length, None, block, right, scored))
    return rows


@dataclass
class TaskAccuracy(Measure):
    """Measures exact match and token accuracy at every test length, by one or two protocols.

    - ``teacher_forced`` takes the most likely token at every scored position, given the correct tokens before this
      position. One forward pass is enough.
    - ``generated`` decodes the answer greedily (`kerple.model.generation.fill_in`).

    Both protocols make the same first error and therefore have the same exact match, unless logits depend on later
    tokens, as in RoPE with dynamic NTK. Set ``generate`` for such a strategy.

    The text is a `kerple.tasks.sampling.Examples`. The column ``protocol`` of the results has ``<task>`` for
    ``teacher_forced``, and ``<task> generated`` for ``generated``. The result has a figure of exact match against
    length, and a heat map if `Task.axes` names several sizes. Validations log ``exact_match`` and ``token_accuracy``.

    Args:
        generate: Whether to also measure by the protocol ``generated``.
    """

    generate: bool = False

    name: ClassVar[str] = "accuracy"
    needs: ClassVar[tuple[type, ...]] = (Transformer,)
    validates = True

    def check(self, network: Any, text: Any) -> None:
        require_capabilities(self, network, self.needs)
        self.check_validation(text)

    def check_validation(self, text: Any) -> None:
        expected = "the examples of a task; use TaskData, or leave out TaskAccuracy"
        require(isinstance(text, Examples), "TaskAccuracy: data", type(text).__name__, expected)

    def validate(self, network: Any, text: Examples, runner: Runner) -> dict[str, float]:
        table = self._tables(network, text, runner, [TEACHER_FORCED])[TEACHER_FORCED]
        if not len(table):
            return {}
        token_accuracy = float(table["right"].sum() / table["scored"].sum())
        return {"exact_match": float(table["exact"].mean()), "token_accuracy": token_accuracy}

    def measure(self, network: Any, text: Examples, runner: Runner) -> Result:
        task, training_length, title = text.task, text.training_length, f"{text.task.name}, {network.name}"
        protocols = [TEACHER_FORCED, GENERATED] if self.generate else [TEACHER_FORCED]
        tables = self._tables(network, text, runner, protocols)
        result = Result(self.name)
        lines = []
        for protocol, table in tables.items():
            rows = result_rows(task.name if protocol == TEACHER_FORCED else f"{task.name} generated", table)
            result.sums += rows
            for cell in results_table.totals(pd.DataFrame(rows, columns=ROW_COLUMNS)).to_dict("records"):
                result.scalars[f"{cell['metric']}/{protocol}/{cell['length']}"] = cell["value"]
        answers = tables[TEACHER_FORCED]
        untested = sorted(set(text.lengths) - set(answers["length"]))
        reason = "the test split has no problems of this length, or the network has too few positions"
        skipped = [{"protocol": task.name, "length": length, "reason": reason} for length in untested]
        result.about = {"strategy": network.name, "training_length": training_length, "precision": runner.precision}
        result.about |= {"skipped": skipped}
        if untested:
            lines.append(f"lengths not tested: {untested}; {reason}")
        if len(answers):
            fractions = {name: table.groupby("length")["exact"].mean() for name, table in tables.items()}
            curves = 100 * pd.DataFrame(fractions)
            lines.append(f"{title}: exact match (%)\n{range_table(curves, training_length)}")
            result.figures[self.name] = exact_match_figure(curves, training_length, title)
            if len(task.axes) > 1:
                cells = answers.pivot_table("exact", "row", "column")
                cells = cells.rename_axis(index=task.axes[-2], columns=task.axes[-1])
                trained = answers.pivot_table("length", "row", "column", aggfunc="max") <= training_length
                result.figures["accuracy_map"] = exact_match_map(cells, trained, f"{title}: teacher-forced exact match")
        result.report = "\n".join(lines)
        return result

    def _tables(
        self, network: Transformer, text: Examples, runner: Runner, protocols: list[str]
    ) -> dict[str, pd.DataFrame]:
        """Return the table of `answer_table` by protocol, without groups that have a problem with too many tokens."""
        limit = length_limit(network) + 1  # a character is a token, and the last one is only a target
        groups = [group for group in text.groups if all(len(example.text) <= limit for example in group)]
        examples = [example for group in groups for example in group]
        counts = {protocol: torch.zeros(2, len(examples), dtype=torch.int64) for protocol in protocols}
        problems = HeldOutProblems(groups, text.batch_size, runner.rank, runner.processes)
        for number in runner.progress(range(len(problems))):
            batch = problems[number]
            tokens, scored, index = (batch[name].to(runner.device) for name in ("tokens", "scored", "index"))
            with runner.autocast():
                for protocol, count in counts.items():
                    if protocol == GENERATED:
                        predictions = fill_in(network, tokens, scored)[:, 1:]  # (B, T)
                    else:
                        logits = network(tokens[:, :-1])  # (B, T, V)
                        check_finite(logits)
                        predictions = logits.argmax(-1)  # (B, T)
                    add_answers(count, predictions, tokens[:, 1:], scored, index)
        return {p: answer_table(examples, runner.sum(count.to(runner.device))) for p, count in counts.items()}


def range_table(curves: pd.DataFrame, train_length: int) -> pd.DataFrame:
    """Return the means of each curve over the training lengths, and over at most four ranges of longer lengths."""
    longest = int(curves.index.max())
    width = max(1, -(-(longest - train_length) // 4))
    edges = [0, train_length, *range(train_length + width, longest + width, width)]
    ranges = pd.cut(curves.index.to_series(), edges, labels=[f"{a + 1}-{b}" for a, b in pairwise(edges)])
    return curves.groupby(ranges, observed=True).mean().round(1).rename_axis("length")


def exact_match_figure(curves: pd.DataFrame, train_length: int, title: str) -> Figure:
    """Draw exact match against length, with the lengths of training shaded.

    Args:
        curves: Exact match in percent, with a row for each length and a column for each protocol.
        train_length: Largest length of training problems.
        title: Title of the figure.
    """
    figure, axes = panel(6, 4)
    axes.axvspan(0.5, train_length + 0.5, color="0.92", label="lengths of training")
    for label, curve in curves.items():
        axes.plot(curve.index, curve, marker=".", label=label)
    axes.set(xlabel="length of the problem", ylabel="exact match (%)", ylim=(-3, 103), title=title)
    axes.legend(fontsize="small")
    return figure


def exact_match_map(cells: pd.DataFrame, trained: pd.DataFrame, title: str) -> Figure:
    """Draw a heat map of exact match over two sizes of the problems (`Task.axes`), with a frame around training sizes.

    Args:
        cells: Fraction of exact matches, with a row for each value of one size, and a column for each value of the
            other. The names of its index and columns label the axes. Cells without test problems are NaN and white.
        trained: Whether the problems of each cell have a length of training; the frame ends after the last such row and
            the last such column.
        title: Title of the figure.
    """
    figure, axes = panel(6, 5)
    image = axes.imshow(100 * cells, origin="lower", vmin=0, vmax=100, cmap="viridis", aspect="auto")
    for axis, sizes in ((axes.xaxis, cells.columns), (axes.yaxis, cells.index)):
        ticks = range(0, len(sizes), -(-len(sizes) // MAX_TICKS))
        axis.set_ticks(ticks, [str(sizes[i]) for i in ticks])
    top, right = (np.flatnonzero(trained.any(axis=axis)).max(initial=-1) + 0.5 for axis in (1, 0))
    axes.plot([-0.5, right, right], [top, top, -0.5], color="red", linewidth=1)
    axes.set(xlabel=cells.columns.name, ylabel=cells.index.name, title=title)
    figure.colorbar(image, label="exact match (%)")
    return figure
