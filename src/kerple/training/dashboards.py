"""`Dashboards`: the layout of TensorBoard's pages."""

import os
from collections.abc import Iterator

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import TensorBoardLogger

from kerple.model.generation import generate
from kerple.positions import Position
from kerple.training.lightning_types import data_of, network_of, tensorboard_writers
from kerple.training.sharding import ShardedBlocks, whole
from kerple.training.throughput import position_parameters

MOST_NEW = 64  # tokens of a sample of text
TRAINING_CHARTS = {
    "loss": ["Multiline", ["train/loss", "val/loss"]],
    "validation perplexity at each length, by step": ["Multiline", ["val/ppl/full/.*"]],
    "tokens per second": ["Multiline", ["train/tokens_per_second"]],
}


class Dashboards(Callback):
    """Lays out TensorBoard's pages, and writes what they show beside the scalars that other callbacks log.

    - *Custom scalars*: the course of training in three charts. What is measured against length is a figure instead,
      among the images, because TensorBoard smooths every scalar over its steps.
    - *HParams*: the strategy, the seed, the model's settings, and the last value of each metric.
    - *Histograms*: each parameter of the strategy as ``kernels/<name>``, after each validation.
    - *Text*: how the model continues the beginning of the validation split, after each validation, where data are text.

    It does nothing without a TensorBoardLogger.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for writer in tensorboard_writers(trainer):
            writer.add_custom_scalars({"training": TRAINING_CHARTS})
        self._histograms(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._histograms(trainer, pl_module)
            self._sample(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._hyperparameters(trainer, pl_module, ("val/", "train/"))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._hyperparameters(trainer, pl_module, ("test/",))

    def _histograms(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # whole on every rank, and copies: TensorBoard makes numpy arrays of them, whose memory FSDP could not free
        parameters = {name: whole(p.detach()).float().cpu().clone() for name, p in _parameters(pl_module)}
        for writer in tensorboard_writers(trainer):
            for name, parameter in parameters.items():
                if torch.isfinite(parameter).all():  # else TensorBoard raises before `NonFiniteGuard`
                    writer.add_histogram(f"kernels/{name}", parameter, trainer.global_step)

    def _sample(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write half a segment of the validation split, and how the model continues it greedily, at most as long."""
        data = data_of(trainer)
        # this rank alone generates, so it needs all parameters; and tasks have no text
        if not (hasattr(data, "blocks") and hasattr(data, "decode")) or isinstance(trainer.strategy, ShardedBlocks):
            return
        network = network_of(pl_module)
        half = max(1, network.shape.length // 2)
        if not (writers := tensorboard_writers(trainer)):
            return
        start = data.blocks("validation", half, 1)[0][:half]
        with trainer.precision_plugin.forward_context():
            tokens = generate(network, start[None].to(pl_module.device), min(half, MOST_NEW))
            new = [int(token) for token in tokens]
        prompt = data.decode(start.tolist())
        texts = {"given": prompt, "continued": data.decode(start.tolist() + new)[len(prompt) :]}
        # an indented line is shown verbatim
        parts = [f"{name}:\n\n    " + "\n    ".join(text.splitlines()) for name, text in texts.items()]
        for writer in writers:
            writer.add_text("sample", "\n\n".join(parts), trainer.global_step)

    def _hyperparameters(self, trainer: Trainer, pl_module: LightningModule, prefixes: tuple[str, ...]) -> None:
        strategy = next((type(m).__name__ for m in pl_module.modules() if isinstance(m, Position)), "none")
        # TensorBoard shows the first few columns by name, and then the metrics: these two belong among them
        settings = {"1 strategy": strategy, "2 seed": int(os.environ.get("PL_GLOBAL_SEED", -1))}
        settings |= {"position_parameters": position_parameters(pl_module), "max_steps": trainer.max_steps}
        settings |= {
            name: value
            for name, value in pl_module.hparams.items()
            if isinstance(value, bool | int | float | str) and not name.startswith("_")
        }
        logged = trainer.callback_metrics
        metrics = {k: float(logged[k]) for prefix in prefixes for k in logged if k.startswith(prefix)}  # results first
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and metrics:
                logger.log_hyperparams(settings, metrics, step=trainer.global_step)


def _parameters(pl_module: LightningModule) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, parameter) of all strategies. If each layer has its own strategy, the layer is part of the name."""
    strategies = list(dict.fromkeys(m for m in pl_module.modules() if isinstance(m, Position)))
    for i, strategy in enumerate(strategies):
        for name, parameter in strategy.named_parameters():
            yield (name if len(strategies) == 1 else f"{i}/{name}"), parameter
