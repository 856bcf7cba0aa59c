"""`Dashboards`: the layout of TensorBoard's pages."""

import os
from collections.abc import Iterator

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import TensorBoardLogger

from kerple.positions import Position
from kerple.training.lightning_types import tensorboard_writers
from kerple.training.sharding import whole
from kerple.training.throughput import position_parameters

TRAINING_CHARTS = {
    "loss": ["Multiline", ["train/loss", "val/loss"]],
    "validation perplexity at each length, by step": ["Multiline", ["val/ppl/full/.*"]],
    "tokens per second": ["Multiline", ["train/tokens_per_second"]],
}


class Dashboards(Callback):
    """Sets the layout of TensorBoard's pages and writes their content, apart from the scalars of other callbacks.

    - *Custom scalars*: three charts of the training.
    - *HParams*: the strategy, the seed, the options of the model, and the last value of each metric.
    - *Histograms*: each parameter of the strategy as ``kernels/<name>``, after each validation.

    Measurements against length are figures among the images, because TensorBoard smooths scalars over steps. Without a
    TensorBoardLogger, the callback does nothing.
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
        # copies, because TensorBoard makes numpy arrays of them, and FSDP cannot free the memory of numpy arrays
        parameters = {name: whole(p.detach()).float().cpu().clone() for name, p in _parameters(pl_module)}
        for writer in tensorboard_writers(trainer):
            for name, parameter in parameters.items():
                if torch.isfinite(parameter).all():  # TensorBoard would raise an error before `NonFiniteGuard`
                    writer.add_histogram(f"kernels/{name}", parameter, trainer.global_step)

    def _hyperparameters(self, trainer: Trainer, pl_module: LightningModule, prefixes: tuple[str, ...]) -> None:
        strategy = next((type(m).__name__ for m in pl_module.modules() if isinstance(m, Position)), "none")
        # TensorBoard sorts columns by name; the numbers put these two first
        settings = {"1 strategy": strategy, "2 seed": int(os.environ.get("PL_GLOBAL_SEED", -1))}
        settings |= {"position_parameters": position_parameters(pl_module), "max_steps": trainer.max_steps}
        settings |= {
            name: value
            for name, value in pl_module.hparams.items()
            if isinstance(value, bool | int | float | str) and not name.startswith("_")
        }
        logged = trainer.callback_metrics
        metrics = {k: float(logged[k]) for prefix in prefixes for k in logged if k.startswith(prefix)}
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and metrics:
                logger.log_hyperparams(settings, metrics, step=trainer.global_step)


def _parameters(pl_module: LightningModule) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, parameter) of all strategies. If there are several strategies, the name begins with their number."""
    strategies = list(dict.fromkeys(m for m in pl_module.modules() if isinstance(m, Position)))
    for i, strategy in enumerate(strategies):
        for name, parameter in strategy.named_parameters():
            yield (name if len(strategies) == 1 else f"{i}/{name}"), parameter
