"""`Analysis`: the base of callbacks that analyse a trained model in `test`, and functions to write their results."""

import csv
import json
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from kerple.base.errors import UserError
from kerple.evaluation.metrics import TokenLoss
from kerple.evaluation.results import OWN_TABLES, reach, strategy
from kerple.evaluation.typed import data_of, network_of, untyped


class Analysis(Callback):
    """An analysis of a trained model, which runs at the end of `test`.

    It writes numbers to ``<name>.csv`` and a figure to ``<name>.png``, in the run's log directory, and the figure to
    TensorBoard. A subclass sets ``name`` and overrides `analyse`. It reads the first blocks of the test split; each
    device reads a share of them, and their sums are added.

    Args:
        length: Targets in a block; None for the training length.
        blocks: Number of blocks to read.

    Raises:
        UserError: If a number is not positive. In `setup`, if the test split has fewer blocks than asked for, or two
            analyses would write the same files.
    """

    name: str
    """Name of the files, and of the figure in TensorBoard."""

    def __init__(self, length: int | None = None, blocks: int = 16) -> None:
        super().__init__()
        for name, number in (("length", length), ("blocks", blocks)):
            if number is not None and number < 1:
                raise UserError(f"{type(self).__name__}: {name}: got {number}, expected a positive number")
        self.length = length
        self.blocks = blocks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        datamodule = text_of(trainer, self)
        if sum(isinstance(c, Analysis) and c.name == self.name for c in untyped(trainer).callbacks) > 1:
            raise UserError(
                f"trainer.callbacks: got more than one {type(self).__name__} that writes {self.name}.csv, expected "
                "one; test once for each, with another --run_dir"
            )
        if self.name in OWN_TABLES:
            raise UserError(
                f"{type(self).__name__}: name: got {self.name!r}, which a report needs for a table of its own; choose "
                "another"
            )
        if stage == "test":
            found = len(datamodule.blocks("test", self._length(pl_module), self.blocks))
            if found < self.blocks:
                raise UserError(
                    f"{type(self).__name__}: blocks: got {self.blocks}, but the test split has only {found} of "
                    f"{self._length(pl_module)} targets; lower blocks or length, or use a larger split"
                )

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if why := self.impossible(pl_module):
            skip(trainer, self.name, f"{type(self).__name__}: skipped: {why}")
        else:
            self.analyse(trainer, pl_module)

    def impossible(self, pl_module: LightningModule) -> str | None:
        """Why this analysis cannot be made of this model, or None. The reason is written in place of the results."""
        length, bound = self._length(pl_module), reach(network_of(pl_module))
        if bound is not None and length > bound:
            return f"{strategy_name(pl_module)} has no position past {bound - 1}, the segments have {length} tokens"
        return None

    @abstractmethod
    def analyse(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure, and `publish` the results. Called on every rank, in evaluation mode, without gradients."""

    def read(self, trainer: Trainer, pl_module: LightningModule) -> Iterator[tuple[int, Tensor]]:
        """Yield this device's share of the blocks: (index, tokens (1, length + 1) int64 on the device)."""
        blocks = data_of(trainer).blocks("test", self._length(pl_module), self.blocks)
        for i in range(trainer.global_rank, len(blocks), trainer.world_size):
            yield i, blocks[i]["tokens"].to(pl_module.device)[None]

    def _length(self, pl_module: LightningModule) -> int:
        return self.length or network_of(pl_module).shape.length


def text_of(trainer: Trainer, callback: Callback) -> Any:
    """The data module of a run on text, which has ``blocks(split, length)``.

    Raises:
        UserError: If the run has other data, or none.
    """
    data = data_of(trainer)
    if not hasattr(data, "blocks"):
        given = "none" if data is None else type(data).__name__
        raise UserError(
            f"{type(callback).__name__}: got data {given}, expected text in blocks; use data TokenShards, or drop "
            "this callback"
        )
    return data


def strategy_name(pl_module: LightningModule) -> str:
    """Class name of the model's strategy, as titles have it."""
    return strategy(network_of(pl_module))


def synchronise(*losses: TokenLoss) -> None:
    """Replace each device's sums by those of all devices."""
    for loss in losses:
        loss.sync()


def publish(trainer: Trainer, name: str, figure: Figure | None, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows to ``<name>.csv``, a figure to ``<name>.png``, and the figure to TensorBoard as ``analyses/<name>``.

    Call it on every rank; only the first one writes.

    Args:
        trainer: The trainer, whose log directory and loggers are used.
        name: Name of the files.
        figure: The figure, or None.
        rows: Rows of the table, whose keys are the same.
    """
    directory = log_directory(trainer)
    if not trainer.is_global_zero:
        return
    if rows:
        with (directory / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    if figure is not None:
        figure.savefig(directory / f"{name}.png", dpi=150)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_figure(f"analyses/{name}", figure, global_step=trainer.global_step, close=False)


def skip(trainer: Trainer, name: str, reason: str) -> None:
    """Warn that an analysis is not made, and write the reason to ``<name>.json``. Call it on every rank."""
    rank_zero_warn(reason)
    directory = log_directory(trainer)
    if trainer.is_global_zero:
        (directory / f"{name}.json").write_text(json.dumps({"skipped": reason}) + "\n", encoding="utf-8")


def log_directory(trainer: Trainer) -> Path:
    """The run's log directory, made if it is missing. Call it on every rank, because Lightning broadcasts the path."""
    directory = Path(trainer.log_dir or trainer.default_root_dir)
    if trainer.is_global_zero:
        directory.mkdir(parents=True, exist_ok=True)
    return directory
