"""`Dashboards`: TensorBoard pages of training curves, hyperparameters, and histograms of the strategy's parameters."""

import os
from pathlib import Path

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import TensorBoardLogger
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch.utils.tensorboard.summary import hparams

from kerple.positions import Position
from kerple.training.sharding import full_tensor
from kerple.training.throughput import count_position_parameters
from kerple.training.trainer_access import tensorboard_writers

TRAINING_CHARTS = {
    "loss": ["Multiline", ["train/loss", "val/loss"]],
    "validation perplexity at each length, by step": ["Multiline", ["val/ppl/full/.*"]],
    "tokens per second": ["Multiline", ["train/tokens_per_second"]],
}


class Dashboards(Callback):
    """Writes three pages of TensorBoard. Without a TensorBoardLogger, the callback does nothing.

    - *Custom scalars*: three charts of scalars that the model and other callbacks log during training.
    - *HParams*: the strategy and the number of its parameters, the seed, ``max_steps`` of a fit, the options of the
      model that are numbers or strings, and the last value of each metric. They are written at the end of a fit or
      test. A fit and the tests of its checkpoints share one row.
    - *Histograms*: each parameter of the strategy as ``kernels/<name>``, at the start and after each validation.

    Other callbacks log curves over the evaluation length as figures. As scalars, such curves would have the length as
    their step, and TensorBoard smooths scalars over steps.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for writer in tensorboard_writers(trainer):
            writer.add_custom_scalars({"training": TRAINING_CHARTS})
        self._histograms(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._histograms(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._hyperparameters(trainer, pl_module, ("val/", "train/"))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._hyperparameters(trainer, pl_module, ("test/",))

    def _histograms(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategies = [module for module in pl_module.modules() if isinstance(module, Position)]
        # with several strategies, a name begins with the strategy's number
        named = {
            name if len(strategies) == 1 else f"{i}/{name}": parameter
            for i, strategy in enumerate(strategies)
            for name, parameter in strategy.named_parameters()
        }
        # copies, because TensorBoard makes numpy arrays of them, and FSDP cannot free the memory of numpy arrays
        parameters = {name: full_tensor(p.detach()).float().cpu().clone() for name, p in named.items()}
        for writer in tensorboard_writers(trainer):
            for name, parameter in parameters.items():
                if torch.isfinite(parameter).all():  # TensorBoard would raise an error before `NonFiniteGuard`
                    writer.add_histogram(f"kernels/{name}", parameter, trainer.global_step)

    def _hyperparameters(self, trainer: Trainer, pl_module: LightningModule, prefixes: tuple[str, ...]) -> None:
        strategy = next((type(m).__name__ for m in pl_module.modules() if isinstance(m, Position)), "none")
        # TensorBoard sorts columns by name, and shows the first five: the numbers select these
        settings = {"1 strategy": strategy, "2 seed": int(os.environ.get("PL_GLOBAL_SEED", -1))}
        options = {name: value for name, value in pl_module.hparams.items() if not name.startswith("_")}
        steps = trainer.max_steps if trainer.state.fn == "fit" else None
        settings |= {"3 lr": options.pop("lr", None), "4 max_steps": steps}
        settings |= {"5 position_parameters": count_position_parameters(pl_module)} | options
        settings = {name: value for name, value in settings.items() if isinstance(value, bool | int | float | str)}
        metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith(prefixes)}
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and metrics and trainer.is_global_zero:
                _start_session(logger, _run_name(trainer), settings, metrics)
                logger.log_hyperparams(settings, metrics, step=trainer.global_step)


def _run_name(trainer: Trainer) -> str:
    """Return the last parts of the path of the fit's folder, also in a test of one of its checkpoints."""
    folder = Path(trainer.default_root_dir).absolute()  # not log_dir, which every rank would have to call
    if trainer.state.fn != "fit" and trainer.ckpt_path:
        folder = Path(trainer.ckpt_path).absolute().parent
        folder = folder.parent if folder.name == "checkpoints" else folder
    return "/".join(folder.parts[-3:])  # experiment, strategy and seed


def _start_session(
    logger: TensorBoardLogger, group: str, settings: dict[str, object], metrics: dict[str, float]
) -> None:
    """Write the start of a session of the group, which is a row of the page *HParams*.

    TensorBoard reads only the first start in a file, so that `TensorBoardLogger.log_hyperparams`, which sets no group,
    must be called later.
    """
    start = hparams(settings, metrics)[1]
    plugin = start.value[0].metadata.plugin_data
    data = HParamsPluginData.FromString(plugin.content)
    data.session_start_info.group_name = group
    plugin.content = data.SerializeToString()
    logger.experiment._get_file_writer().add_summary(start)
