"""`Dashboards`: the layout of TensorBoard's pages."""

import re
from collections.abc import Iterator

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import TensorBoardLogger
from torch.utils.tensorboard import SummaryWriter

from kerple.positions import Position
from kerple.training.throughput import position_parameters

AGAINST_LENGTH = "against_length"
CURVE = re.compile(r"test/([^/]+)/([^/]+)/(\d+)")  # metric, protocol, length
TRAINING_CHARTS = {
    "loss": ["Multiline", ["train/loss", "val/loss"]],
    "validation perplexity at each length, by step": ["Multiline", ["val/ppl/full/.*"]],
    "tokens per second": ["Multiline", ["train/tokens_per_second"]],
}


class Dashboards(Callback):
    """Lays out TensorBoard's pages, and writes what they show beside the scalars that other callbacks log.

    - *Custom scalars*: each ``test/<metric>/<protocol>/<length>`` of `Extrapolation` as a curve over length. For this
      it is also written as the scalar ``against_length/<metric>/<protocol>``, whose step is the length.
    - *HParams*: the model's settings, the strategy, and the last value of each metric.
    - *Histograms*: each parameter of the strategy as ``kernels/<name>``, after each validation.

    It does nothing without a TensorBoardLogger.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for writer in _writers(trainer):
            # TensorBoard shows the sections of all runs in the order of the first run; the empty section
            # "extrapolation" keeps the top for the curves that `test` writes
            writer.add_custom_scalars({"extrapolation": {}, "training": TRAINING_CHARTS})
        self._histograms(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._histograms(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._hyperparameters(trainer, pl_module, ("train/", "val/"))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        names = {name: CURVE.fullmatch(name) for name in trainer.callback_metrics}
        curves = {match.groups(): float(trainer.callback_metrics[name]) for name, match in names.items() if match}
        # a tag is a regular expression, and a chart shows it for all runs that are selected
        charts = {
            f"{metric} against length": ["Multiline", [f"{AGAINST_LENGTH}/{metric}/.*"]]
            for metric in dict.fromkeys(metric for metric, _, _ in curves)
        }
        for writer in _writers(trainer):
            if charts:
                writer.add_custom_scalars({"extrapolation": charts})
            for (metric, protocol, length), value in curves.items():
                writer.add_scalar(f"{AGAINST_LENGTH}/{metric}/{protocol}", value, global_step=int(length))
        self._hyperparameters(trainer, pl_module, ("test/",))

    def _histograms(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for writer in _writers(trainer):
            for name, parameter in _parameters(pl_module):
                if torch.isfinite(parameter).all():  # else TensorBoard raises, before `Finite` can say what is wrong
                    writer.add_histogram(f"kernels/{name}", parameter.detach().float().cpu(), trainer.global_step)

    def _hyperparameters(self, trainer: Trainer, pl_module: LightningModule, prefixes: tuple[str, ...]) -> None:
        settings = {
            key: value for key, value in pl_module.hparams.items() if isinstance(value, bool | int | float | str)
        }
        strategy = next((type(m).__name__ for m in pl_module.modules() if isinstance(m, Position)), "none")
        parameters = position_parameters(pl_module)
        settings |= {"strategy": strategy, "position_parameters": parameters, "max_steps": trainer.max_steps}
        metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith(prefixes)}
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and metrics:
                logger.log_hyperparams(settings, metrics, step=trainer.global_step)


def _writers(trainer: Trainer) -> Iterator[SummaryWriter]:
    """Yield the writers of all TensorBoard loggers; on other ranks than the first, none."""
    if trainer.is_global_zero:
        yield from (logger.experiment for logger in trainer.loggers if isinstance(logger, TensorBoardLogger))


def _parameters(pl_module: LightningModule) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, parameter) of all strategies. If each layer has its own strategy, the layer is part of the name."""
    strategies = list(dict.fromkeys(m for m in pl_module.modules() if isinstance(m, Position)))
    for i, strategy in enumerate(strategies):
        for name, parameter in strategy.named_parameters():
            yield (name if len(strategies) == 1 else f"{i}/{name}"), parameter
