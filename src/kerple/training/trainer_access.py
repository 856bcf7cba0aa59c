"""Functions by which callbacks access the network, the Trainer, the writers of TensorBoard and the run's folder.

Only this file touches private attributes of Lightning.
"""

from pathlib import Path
from typing import Any, cast

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging, WeightAveraging
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor
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


def set_unused_averages(trainer: Trainer, pl_module: LightningModule) -> None:
    """Set averages of weights that have not begun yet to the present weights, as their first update does.

    Lightning would validate, save and use the initial weights in place of such an average.
    """
    for callback in averaging(trainer):
        average = callback._average_model
        if average is not None and not int(average.n_averaged):
            average.module.load_state_dict(pl_module.state_dict())


def averaging(trainer: Trainer) -> list[WeightAveraging]:
    """Return the callbacks that average weights after steps."""
    return [callback for callback in untyped(trainer).callbacks if isinstance(callback, WeightAveraging)]


def copied_weights(pl_module: LightningModule) -> dict[str, Tensor]:
    """Return a copy of the weights, which later steps do not change."""
    return {name: weight.detach().clone() for name, weight in pl_module.state_dict().items()}


def use_epoch_averages(trainer: Trainer, pl_module: LightningModule) -> dict[str, Tensor] | None:
    """Set the weights to the mean over epochs if the fit ended before its last epoch, after which Lightning does so.

    Returns:
        The trained weights, with which the fit can continue; None if the weights have not changed.
    """
    trained = None
    for callback in untyped(trainer).callbacks:
        begun = isinstance(callback, StochasticWeightAveraging) and callback.n_averaged is not None
        if begun and trainer.current_epoch - 1 < callback.swa_end:
            trained = copied_weights(pl_module)
            callback.transfer_weights(callback._average_model, pl_module)
    return trained


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


def inside_step(trainer: Trainer) -> bool:
    """Return whether the gradients of a batch are accumulated, so that no optimiser step follows it."""
    return trainer.fit_loop._should_accumulate()


def validation_ahead(trainer: Trainer) -> bool:
    """Return whether a validation follows this batch, and has not begun yet."""
    loop: Any = trainer.fit_loop.epoch_loop
    counts = loop.batch_progress.total
    # the counts differ only in on_train_batch_end, which precedes a validation; when `ModelCheckpoint` saves after the
    # validation, they are equal
    before_validation = counts.completed != counts.processed and not trainer.validating
    return before_validation and loop._should_check_val_fx(trainer.fit_loop._data_fetcher)


def restore_loader(trainer: Trainer) -> None:
    """Restore the state of the training loader from a checkpoint of a finished epoch.

    Without ``max_steps``, Lightning only restores it inside an epoch, so that the samples would begin again.
    """
    loop: Any = trainer.fit_loop
    if states := loop._combined_loader_states_to_load:
        loop._combined_loader._load_state_dicts(states)
        loop._combined_loader_states_to_load = []


def begin_next_epoch(trainer: Trainer) -> None:
    """Count the epoch that follows a checkpoint of a finished epoch, in which Lightning resumes without counting it.

    After a fit that has ended with an epoch, Lightning would read one batch in the next epoch.
    """
    loop: Any = trainer.fit_loop
    batches = loop.epoch_loop.batch_progress
    if loop.restarting and batches.is_last_batch and batches.current.completed >= trainer.num_training_batches:
        batches.reset_on_run()
    progress = loop.epoch_progress
    if loop.restarted_mid_epoch and progress.current.ready == progress.current.processed:
        progress.increment_ready()
        progress.increment_started()


def log_step(trainer: Trainer) -> None:
    """Log the metrics of a step in on_train_batch_end. Lightning logs them after this hook."""
    trainer._logger_connector.update_train_step_metrics()


def leave_signals(trainer: Trainer) -> None:
    """Stop Lightning from broadcasting its record of signals at each micro-batch, which waits for the GPU.

    The record is always empty, because `kerple.training.signals` replaces Lightning's handlers.
    """
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def is_restoring(trainer: Trainer) -> bool:
    """Return whether the Trainer is restoring a checkpoint."""
    return bool(trainer._checkpoint_connector._loaded_checkpoint)  # set only while a checkpoint is restored


def spawns_processes(trainer: Trainer) -> bool:
    """Return whether the strategy starts its processes by spawn, which must pickle the run."""
    return getattr(trainer.strategy.launcher, "_start_method", None) == "spawn"
