"""What all analyses share: when they run, which text they read, where their results go."""

import csv
import json
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from matplotlib.figure import Figure
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from kerple.errors import UserError
from kerple.evaluation.metrics import TokenLoss
from kerple.evaluation.results import reach, strategy


class Analysis(Callback):
    """An analysis of a trained model: runs at the end of `test`, writes a figure to TensorBoard and to ``<name>.png``
    in
    the log directory, and the numbers behind it to ``<name>.csv``.

    Text is the first blocks of the test split; each device reads its share, sums are added.

    Args:
        length: Targets in a block; None for the training length.
        blocks: How many blocks are read. Fewer are an error, not a smaller sample.

    Raises:
        UserError: If a number is not positive, or, once the data is known, there are not so many blocks.
    """

    name: ClassVar[str]
    """Of the files, and of the figure in TensorBoard."""

    def __init__(self, length: int | None = None, blocks: int = 16) -> None:
        super().__init__()
        for name, number in (("length", length), ("blocks", blocks)):
            if number is not None and number < 1:
                raise UserError(f"{type(self).__name__}: {name}: got {number}, expected a positive number")
        self.length = length
        self.blocks = blocks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        datamodule = trainer.datamodule
        if datamodule is None or not hasattr(datamodule, "blocks"):
            raise UserError(
                f"{type(self).__name__}: the trainer has no data module with blocks(split, length); give it TokenShards"
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
        """Why this model cannot be analysed so, or None. A comparison goes on without it, and the reason is written."""
        length, bound = self._length(pl_module), reach(pl_module.network)
        if bound is not None and length > bound:
            return f"{strategy_name(pl_module)} has no position past {bound - 1}, the segments have {length} tokens"
        return None

    @abstractmethod
    def analyse(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure and `publish`; called on every rank, in eval mode, without gradient."""

    def read(self, trainer: Trainer, pl_module: LightningModule) -> Iterator[tuple[int, Tensor]]:
        """This device's share of the blocks: (index, tokens (1, length+1) int64 on the device)."""
        blocks = trainer.datamodule.blocks("test", self._length(pl_module), self.blocks)
        for i in range(trainer.global_rank, len(blocks), trainer.world_size):
            yield i, blocks[i]["tokens"].to(pl_module.device)[None]

    def _length(self, pl_module: LightningModule) -> int:
        return self.length or pl_module.network.shape.length


def strategy_name(pl_module: LightningModule) -> str:
    """Class name of the model's strategy, for titles."""
    return strategy(pl_module.network)


def synchronise(*losses: TokenLoss) -> None:
    """Add the sums of all devices."""
    for loss in losses:
        loss.sync()


def publish(trainer: Trainer, name: str, figure: Figure | None, rows: Sequence[dict[str, Any]]) -> None:
    """Write ``<name>.csv`` and ``<name>.png`` and show the figure in TensorBoard as ``analyses/<name>``.

    Must be called on every rank; only the first one writes.
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
    """Warn that there is no such analysis, and leave the reason in ``<name>.json``; to be called on every rank."""
    rank_zero_warn(reason)
    directory = log_directory(trainer)
    if trainer.is_global_zero:
        (directory / f"{name}.json").write_text(json.dumps({"skipped": reason}) + "\n", encoding="utf-8")


def log_directory(trainer: Trainer) -> Path:
    """The run's log directory, made if it is missing; to be called on every rank, because Lightning broadcasts it."""
    directory = Path(trainer.log_dir or trainer.default_root_dir)
    if trainer.is_global_zero:
        directory.mkdir(parents=True, exist_ok=True)
    return directory
