"""`Analysis`: the base of callbacks that analyse a trained model in `test`, and functions to write their results."""

import csv
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.figure import Figure
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from kerple.base.errors import UserError
from kerple.evaluation.metrics import TokenLoss
from kerple.evaluation.progress_lines import with_progress
from kerple.evaluation.typed import (
    data_of,
    log_directory,
    max_positions,
    network_of,
    strategy_name,
    trained_with,
    untyped,
)


class Analysis(Callback):
    """An analysis of a trained model, which runs at the end of `test`.

    It writes numbers to ``<name>.csv`` and a figure to ``<name>.png``, in the run's log directory, and the figure to
    TensorBoard. A subclass sets ``name`` and overrides `analyse`. It reads the first blocks of the test split; each
    device reads some of them, and the sums of all devices are added.

    Args:
        length: Targets in a block; None for the training length.
        blocks: Number of blocks to read; None for all.

    Raises:
        UserError: If a number is not positive. In `setup`, if the data is not text, if the test split has fewer blocks,
            if the length is above `max_length`, or if two analyses would write the same files.
    """

    name: str
    """Name of the files, and of the figure in TensorBoard."""
    max_length: int | None = None
    """Largest number of targets in a block, for analyses whose memory grows with its square."""
    one_length: bool = True
    """Whether a model without positions for a whole block is skipped; else the lengths that are too long for it are."""

    def __init__(self, length: int | None = None, blocks: int | None = 16) -> None:
        super().__init__()
        for name, number in (("length", length), ("blocks", blocks)):
            if number is not None and number < 1:
                raise UserError(f"{type(self).__name__}: {name}: got {number}, expected a positive number")
        self.length = length
        self.blocks: Any = blocks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        data = data_of(trainer)
        if not hasattr(data, "blocks"):
            raise UserError(
                f"{type(self).__name__}: got data {type(data).__name__}, expected text in blocks; use the "
                "data module TokenShards, or drop this callback"
            )
        if sum(getattr(callback, "name", None) == self.name for callback in untyped(trainer).callbacks) > 1:
            raise UserError(
                f"trainer.callbacks: got more than one {type(self).__name__} that writes {self.name}, expected one; "
                "test once for each, with another --run_dir"
            )
        length, limit = self.targets(pl_module), self.max_length
        if limit is not None and length > limit:
            raise UserError(f"{type(self).__name__}: length: got {length}, expected at most {limit}")
        if stage == "test":  # raise now, not after hours, if there is too little text
            self.text(trainer, length)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if reason := self.skip_reason(pl_module):
            rank_zero_warn(f"{type(self).__name__}: skipped: {reason}")
        else:
            self.analyse(trainer, pl_module)

    def skip_reason(self, pl_module: LightningModule) -> str | None:
        """Why this analysis cannot be made of this model, or None. A warning gives the reason."""
        length, limit = self.targets(pl_module), max_positions(network_of(pl_module))
        if self.one_length and length > limit:
            return f"{strategy_name(pl_module)} has only {limit} positions, the segments have {length} tokens"
        return None

    @abstractmethod
    def analyse(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure, and `publish` the results. Called on every rank, in evaluation mode, without gradients."""

    def targets(self, pl_module: LightningModule) -> int:
        """Targets in a block: the option ``length``, or the training length."""
        return self.length or trained_with(pl_module)

    def text(self, trainer: Trainer, length: int) -> Any:
        """The blocks of ``length`` targets that all devices together read, a sequence of {"tokens": (length + 1,)}."""
        blocks = data_of(trainer).blocks("test", length, self.blocks)
        if len(blocks) < (self.blocks or 1):
            raise UserError(
                f"{type(self).__name__}: blocks: got {self.blocks}, but the test split has only {len(blocks)} of "
                f"{length} targets; lower blocks or length, or use a larger split"
            )
        return blocks

    def possible(self, lengths: Sequence[int], pl_module: LightningModule) -> tuple[list[int], list[dict[str, Any]]]:
        """The lengths that the strategy can represent, and for each other length why it is skipped."""
        limit = max_positions(network_of(pl_module))
        possible = [length for length in lengths if length <= limit]
        reason = f"the strategy has only {limit} positions"
        others = [length for length in lengths if length not in possible]
        return possible, [{"protocol": self.name, "length": length, "reason": reason} for length in others]

    def read(self, trainer: Trainer, pl_module: LightningModule) -> Iterator[tuple[int, Tensor]]:
        """Yield the blocks that this device reads: (index, tokens (1, length + 1) int64 on the device)."""
        yield from device_blocks(trainer, pl_module, self.text(trainer, self.targets(pl_module)))


def device_blocks(trainer: Trainer, pl_module: LightningModule, blocks: Any) -> Iterator[tuple[int, Tensor]]:
    """Yield the blocks that this device reads, every n-th of n devices: (index, tokens (1, length + 1) int64)."""
    for i in with_progress(trainer, range(trainer.global_rank, len(blocks), trainer.world_size)):
        yield i, blocks[i]["tokens"].to(pl_module.device)[None]


def synchronise(*losses: TokenLoss) -> None:
    """Replace each device's sums by those of all devices.

    Raises:
        UserError: If a sum is not finite.
    """
    for loss in losses:
        loss.sync()
        if not loss.nll.isfinite().all():
            raise UserError("a loss of the test text is no finite number; are the weights? Test another checkpoint")


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
