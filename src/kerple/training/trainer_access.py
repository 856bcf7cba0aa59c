"""Functions by which callbacks access the network, the Trainer, the writers of TensorBoard and the run's folder."""

from pathlib import Path
from typing import Any, cast

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import GradientAccumulationScheduler
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.strategies import ModelParallelStrategy
from torch.utils.tensorboard import SummaryWriter

from kerple.base.errors import UserError
from kerple.model import Transformer


def network_of(pl_module: LightningModule) -> Transformer:
    """Return the network of a `kerple.training.language_model.LanguageModel`."""
    return cast(Transformer, pl_module.network)


def refuse_shards(trainer: Trainer, callback: str, advice: str) -> None:
    """Raise a UserError if parameters are sharded, for a callback that needs whole parameters."""
    if isinstance(trainer.strategy, ModelParallelStrategy):
        raise UserError(f"trainer.callbacks: got {callback}, which does not support sharded parameters; {advice}")


def untyped(trainer: Trainer) -> Any:
    """Return the Trainer as Any, because its type lacks attributes such as ``callbacks`` and ``log_every_n_steps``."""
    return trainer


def accumulation_option(trainer: Trainer) -> int:
    """Return the option ``accumulate_grad_batches``, whose attribute a GradientAccumulationScheduler changes by epoch.

    Lightning requires 1 with this callback.
    """
    scheduled = any(isinstance(callback, GradientAccumulationScheduler) for callback in untyped(trainer).callbacks)
    return 1 if scheduled else trainer.accumulate_grad_batches


def tensorboard_writers(trainer: Trainer) -> list[SummaryWriter]:
    """Return the writers of all TensorBoard loggers; an empty list on ranks other than the first."""
    loggers = trainer.loggers if trainer.is_global_zero else []
    return [logger.experiment for logger in loggers if isinstance(logger, TensorBoardLogger)]


def log_directory(trainer: Trainer) -> Path:
    """Make the folder of a run and return its path. Call it on every rank, because it broadcasts the path."""
    directory = Path(trainer.log_dir or trainer.default_root_dir)
    if trainer.is_global_zero:
        directory.mkdir(parents=True, exist_ok=True)
    return directory
