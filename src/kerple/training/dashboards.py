"""`Dashboards`: TensorBoard pages of training curves, hyperparameters, and histograms of the strategy's parameters."""

import os

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import TensorBoardLogger

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
    - *HParams*: the strategy and the number of its parameters, the seed, ``max_steps``, the options of the model that
      are numbers or strings, and the last value of each metric. They are written at the end of a fit or test.
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
        # TensorBoard sorts columns by name; the numbers put these two first
        settings = {"1 strategy": strategy, "2 seed": int(os.environ.get("PL_GLOBAL_SEED", -1))}
        settings |= {"position_parameters": count_position_parameters(pl_module), "max_steps": trainer.max_steps}
        options = {name: value for name, value in pl_module.hparams.items() if not name.startswith("_")}
        settings |= {name: value for name, value in options.items() if isinstance(value, bool | int | float | str)}
        metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith(prefixes)}
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and metrics:
                logger.log_hyperparams(settings, metrics, step=trainer.global_step)
