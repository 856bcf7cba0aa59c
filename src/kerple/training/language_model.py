"""`LanguageModel`: the LightningModule that trains a `kerple.model.Transformer`, with its optimiser and schedule."""

import math
from collections.abc import Callable
from inspect import signature
from typing import Any, Literal, cast

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.strategies import FSDPStrategy, ModelParallelStrategy
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from pytorch_lightning.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from torch.utils.checkpoint import CheckpointError
from torchmetrics import MeanMetric

from kerple.base.errors import UserError, compiler_error, require
from kerple.model import Batch, Transformer
from kerple.positions import Shape, StrategyBuilder
from kerple.positions.position_coupling import PlaceEmbedding
from kerple.training.muon import Muon
from kerple.training.sharding import ShardedBlocks, full_tensor

ScheduleName = Literal["cosine", "linear", "wsd", "constant"]


class LanguageModel(LightningModule):
    """A decoder that predicts the next token, with any positional strategy (recipe: Chi et al. 2022, section 5).

    A batch is ``{"tokens": (B, T + 1) int64}``, B sequences of T inputs and their targets. It may also have
    ``"scored"``, (B, T) bool, which selects the targets that count, and ``"documents"`` (`kerple.model.Batch`). The
    loss of a step is the mean over the scored targets of the global batch. This loss and its gradient do not depend on
    the division of the batch into micro-batches and devices. Micro-batches without ``"scored"`` must have equal sizes.
    Measurements are callbacks, which use the attribute ``network``.

    Args:
        position: Positional strategy, by class name. Its options are ``model.position.OPTION``.
        vocabulary: Number of token ids, taken from the data.
        length: Training length T in tokens, taken from the data.
        layers: Number of blocks.
        dim: Width of the residual stream.
        heads: Number of attention heads, a divisor of ``dim``.
        pad_vocabulary_to: The number of rows of the embedding is rounded up to a multiple of this number; 128
            suits tensor cores.
        optimizer: ``adamw``; ``muon`` for the matrices of the blocks and AdamW for the rest (`training.muon`); or any
            optimiser by class name, such as ``torch.optim.SGD``, with the options ``model.optimizer.OPTION``. Such an
            optimiser gets two groups of parameters with ``lr`` and ``weight_decay``: matrices and vectors.
        lr: Peak learning rate.
        betas: Betas of AdamW.
        adam_eps: Epsilon of AdamW.
        weight_decay: Weight decay of matrices. Other parameters have none.
        schedule: ``cosine``, ``linear``, ``wsd`` or ``constant`` (`lr_multiplier`), or any schedule by class name,
            such as ``torch.optim.lr_scheduler.StepLR``. A schedule by class name has no warm-up and is updated after
            each step.
        warmup: Fraction of ``trainer.max_steps`` in which the learning rate rises linearly; at least 2 steps.
        final_lr: Last learning rate of ``cosine``, ``linear`` and ``wsd``, as a fraction of the peak.
        decay: Fraction of ``trainer.max_steps`` at the end, in which the learning rate of ``wsd`` decreases.
        compile: Whether torch.compile compiles the network and, on a GPU, the loss in a fit, or a mapping of options
            for torch.compile.
        checkpoint_activations: Whether a fit stores only the input of each block, and the backward pass computes the
            block again. This needs less memory and more time; losses and gradients do not change.
        **options: Options of the network, see `kerple.model.architecture.Architecture`.

    Raises:
        UserError: If a number is out of range, or a strategy cannot be built.
    """

    def __init__(
        self,
        position: StrategyBuilder,
        vocabulary: int,
        length: int,
        layers: int = 12,
        dim: int = 768,
        heads: int = 12,
        pad_vocabulary_to: int = 1,
        optimizer: Literal["adamw", "muon"] | Callable[[list[dict[str, Any]]], Optimizer] = "adamw",
        lr: float = 6e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        adam_eps: float = 1e-8,
        weight_decay: float = 0.0,
        schedule: ScheduleName | Callable[[Optimizer], LRScheduler] = "cosine",
        warmup: float = 0.01,
        final_lr: float = 0.0,
        decay: float = 0.2,
        compile: bool | dict[str, bool | int | str] = False,
        checkpoint_activations: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        require(lr > 0, "model.lr", lr, "a positive learning rate")
        require(all(0 <= beta < 1 for beta in betas), "model.betas", betas, "two numbers in [0, 1)")
        require(adam_eps >= 0, "model.adam_eps", adam_eps, "0 or more")
        require(weight_decay >= 0, "model.weight_decay", weight_decay, "0 or more")
        require(0 <= warmup < 1, "model.warmup", warmup, "a fraction of the steps in [0, 1)")
        require(0 <= final_lr <= 1, "model.final_lr", final_lr, "a fraction of model.lr in [0, 1]")
        require(0 < decay <= 1, "model.decay", decay, "a fraction of the steps in (0, 1]")
        require(pad_vocabulary_to >= 1, "model.pad_vocabulary_to", pad_vocabulary_to, "1 (no padding) or more")
        self.save_hyperparameters()
        rows = math.ceil(vocabulary / pad_vocabulary_to) * pad_vocabulary_to
        self.network = Transformer(Shape(dim, heads, length), layers, rows, position, **options)
        self.network.checkpoint_activations = checkpoint_activations
        self.vocabulary = vocabulary
        self.muon = optimizer == "muon"
        self.build_optimiser: Callable[..., Optimizer] | None = None if isinstance(optimizer, str) else optimizer
        self.lr, self.weight_decay = lr, weight_decay
        self.adam_options: dict[str, Any] = {"betas": tuple(betas), "eps": adam_eps}
        self.schedule, self.warmup, self.final_lr, self.decay = schedule, warmup, final_lr, decay
        self.compile_options = compile
        # sums are fp64, and include losses that are not finite
        self.validation_loss = MeanMetric(nan_strategy="disable").set_dtype(torch.float64)
        self.part_losses = nn.ModuleList()  # the validation loss of each part of a mixture
        # for each micro-batch since the last step, (2,) fp64: the sum of the losses and the number of scored targets
        self._sums: list[Tensor] = []

    def setup(self, stage: str) -> None:
        data = getattr(self.trainer, "datamodule", None)
        vocabulary = getattr(data, "vocabulary", self.vocabulary)
        expected = f"the {self.vocabulary} tokens of the model; use the tokenizer of the training"
        require(vocabulary == self.vocabulary, "data.vocabulary", vocabulary, expected)
        if stage == "fit":
            trainable = not any(strategy.test_only for strategy in self.network.positions)
            given = f"{self.network.name}, which is only for tests of weights trained with another strategy"
            require(trainable, "model.position", given, "a strategy such as RoPE")
        self.mixture: dict[str, float] = getattr(data, "mixture", None) or {}
        losses = (MeanMetric(nan_strategy="disable") for _ in self.mixture)
        self.part_losses = nn.ModuleList(losses).to(self.device)
        self.set_places(data)
        self.network.restart_positions = getattr(data, "restart_positions", True)
        if self.compile_options and stage == "fit":  # not for a test, because each length would be compiled
            try:
                self.network.compile(**(self.compile_options if isinstance(self.compile_options, dict) else {}))
            except Exception as error:  # of torch.compile
                raise compiler_error(error) from error

    def configure_model(self) -> None:
        # Lightning would do this only after it has loaded a checkpoint, and copied the weights to average, in fp32
        if self.trainer.precision == "64-true":
            self.double()
        strategy = self.trainer.strategy
        if isinstance(strategy, ShardedBlocks):
            strategy.shard(self.network)
        elif isinstance(strategy, FSDPStrategy | ModelParallelStrategy):
            kind, expected = type(strategy).__name__, "ShardedBlocks, as in configs/trainer/fsdp.yaml"
            raise UserError(f"trainer.strategy: got {kind}, expected {expected}")

    def set_places(self, data: object) -> None:
        """Give the network the places that the task of the data assigns to tokens, if a strategy embeds places.

        A place is for example the significance of a digit, see `kerple.positions.position_coupling`.

        Raises:
            UserError: If a strategy needs places and the data has none, or strategies of two classes embed places.
        """
        placed = [module for module in self.network.modules() if isinstance(module, PlaceEmbedding)]
        if not placed:
            return
        names = sorted({type(strategy).__name__ for strategy in placed})
        expected = "one of them, because they need different places of a token"
        require(len(names) == 1, "model.position", " and ".join(names), expected)
        expected = f"TaskData, because the strategy {names[0]} needs a task"
        require(hasattr(data, "places"), "data", type(data).__name__, expected)
        self.network.places = cast(Any, data).places(placed[0].scheme)

    def _losses(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return the losses of all targets (B, T), and which of them are scored; None if all are."""
        return self.network.losses(batch["tokens"], documents=batch.get("documents")), batch.get("scored")

    def on_train_start(self) -> None:
        self._sums = []  # of an earlier fit, which was stopped inside a step

    def training_step(self, batch: Batch, index: int) -> Tensor:
        losses, scored = self._losses(batch)
        self._partly_scored = scored is not None
        if scored is None:
            targets = torch.full((), losses.numel(), device=losses.device)
        else:
            losses, targets = losses.where(scored, 0), scored.sum()
        self._sums.append(torch.stack([losses.detach().sum(dtype=torch.float64), targets.double()]))
        # `on_before_optimizer_step` divides by the number of targets in the global batch, which is known only then
        return losses.mean() if scored is None else losses.sum() / self.network.shape.length

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        try:
            super().backward(loss, *args, **kwargs)
        except CheckpointError as error:  # of a strategy or hook that stores tensors between two calls
            reason = f"{self.network.name} computes other tensors in the second forward pass of a block"
            advice = "set it to false, or find the reason with the command check"
            raise UserError(f"model.checkpoint_activations: {reason}; {advice}") from error

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Scale the gradient, so that it is the gradient of the mean loss over the global batch, and log this mean."""
        micro_batches, sums = len(self._sums), torch.stack(self._sums).sum(0)
        self._sums = []
        if self.trainer.world_size > 1:  # not by strategy.reduce, whose barrier waits for the device
            torch.distributed.all_reduce(sums)
        total, targets = sums
        self.log("train/loss", (total / targets).float(), prog_bar=True)
        # the last step of an epoch may have fewer micro-batches, but Lightning always divides by the same number
        scale: Tensor | float = self.trainer.accumulate_grad_batches / micro_batches
        if self._partly_scored:
            # the product of the numbers by which `training_step`, Lightning and DDP have divided the gradient
            divided = self.network.shape.length * self.trainer.accumulate_grad_batches * self.trainer.world_size
            scale = divided / targets.clamp(min=1)
        elif scale == 1:
            return
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)

    def validation_step(self, batch: Batch, index: int, dataloader_idx: int = 0) -> None:
        expected = "one; leave out the others, or use TokenShards with data.mixture"
        require(bool(self.mixture) or dataloader_idx == 0, "data", "several loaders for validation", expected)
        losses, scored = self._losses(batch)
        metric = cast(MeanMetric, self.part_losses[dataloader_idx]) if self.mixture else self.validation_loss
        metric.set_dtype(torch.float64)  # Lightning moves it to the device, which resets it to fp32
        metric.update(losses if scored is None else losses[scored])
        if self.mixture:
            self.log(f"val/loss/{[*self.mixture][dataloader_idx]}", metric, add_dataloader_idx=False)
        else:
            self.log("val/loss", metric, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        """Log the mean of the losses of a mixture's parts, with its weights."""
        if self.mixture:
            losses = [cast(MeanMetric, metric).compute() for metric in self.part_losses]
            weights = torch.tensor(list(self.mixture.values()), device=self.device)
            self.log("val/loss", weights @ torch.stack(losses).float(), prog_bar=True)

    def test_step(self, batch: Batch, index: int) -> None:
        """Do nothing, because measurements read the test split themselves (`kerple.measure`)."""

    def configure_optimizers(self) -> OptimizerLRScheduler:
        expected = "16-mixed, because training diverges in 16-true"
        require(self.trainer.precision != "16-true", "trainer.precision", "16-true", expected)
        groups = self._muon_groups() if self.muon else []
        grouped = {p for group in groups for p in group["params"]}
        rest = [p for p in self.parameters() if p.requires_grad and p not in grouped]
        groups.append({"name": "matrices", "params": [p for p in rest if p.ndim >= 2]})
        groups.append({"name": "vectors", "params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0})
        groups = [{"lr": self.lr, "weight_decay": self.weight_decay} | group for group in groups if group["params"]]
        if self.build_optimiser is not None:
            optimiser = self.build_optimiser(groups)
            # the groups of parameters have their own, so that the class would ignore these two
            for name in ("lr", "weight_decay"):
                parameter, value = signature(type(optimiser)).parameters.get(name), optimiser.defaults.get(name)
                default = None if parameter is None else parameter.default
                if default is not None and value not in (None, default, getattr(self, name)):
                    given = f"got {value}, which has no effect"
                    raise UserError(f"model.optimizer.{name}: {given}; set model.{name} instead")
            # the default of a class may have been given on purpose
            used = f"lr {self.lr:g} (model.lr) and weight_decay {self.weight_decay:g} (model.weight_decay)"
            rank_zero_info(f"model.optimizer: {type(optimiser).__name__} with {used}")
        else:
            kind: Any = Muon if self.muon else torch.optim.AdamW
            # with 16-mixed, a fused optimiser would unscale the gradients only in its step, after they are clipped
            optimiser = kind(groups, fused=self.trainer.precision != "16-mixed", **self.adam_options)
        clipped_late = self.trainer.gradient_clip_val and getattr(optimiser, "_step_supports_amp_scaling", False)
        if clipped_late and self.trainer.precision == "16-mixed":
            advice = "set its option fused to false, or trainer.precision to bf16-mixed"
            raise UserError(f"model.optimizer: got a fused one, whose gradient cannot be clipped in 16-mixed; {advice}")
        # clamp the parameters of strategies to their ranges after each step
        optimiser.register_step_post_hook(lambda *_: self.network.constrain_())
        schedule: Any = {"scheduler": self._schedule_of(optimiser), "interval": "step", "name": "train/lr"}
        return {"optimizer": optimiser, "lr_scheduler": schedule}

    def _schedule_of(self, optimiser: Optimizer) -> LRScheduler:
        schedule, steps = self.schedule, self.trainer.max_steps
        if not isinstance(schedule, str):
            built = schedule(optimiser)
            if isinstance(built, ReduceLROnPlateau):
                reason = "which needs a measured loss after each step"
                raise UserError(f"model.schedule: got {type(built).__name__}, {reason}; use a schedule of the step")
            if (total := getattr(built, "total_steps", None)) is not None:  # of OneCycleLR
                require(total >= steps, "model.schedule.total_steps", total, f"trainer.max_steps, {steps}, or more")
            return built
        expected = "the number of steps of the schedule, 1 or more"
        if steps < 1 and (epochs := self.trainer.max_epochs or 0) > 0:
            expected += f"; max_epochs {epochs} is {self.trainer.estimated_stepping_batches} steps of this data"
        require(steps >= 1, "trainer.max_steps", steps, expected)
        warmup = max(2, round(self.warmup * steps))
        end = max(steps, warmup + 1)
        return LambdaLR(optimiser, lambda step: lr_multiplier(step, schedule, warmup, end, self.final_lr, self.decay))

    def _muon_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups for Muon: the linear layers of blocks, with queries, keys and values split."""
        first = self.network.blocks[0].attention
        qkv = [block.attention.qkv for block in self.network.blocks]
        linear = [m for m in self.network.blocks.modules() if isinstance(m, nn.Linear) and m not in qkv]
        groups: list[dict[str, Any]] = [
            {"name": "qkv", "params": [m.weight for m in qkv if m.weight.requires_grad], "muon": first.widths},
            {"name": "linear", "params": [m.weight for m in linear if m.weight.requires_grad], "muon": []},
        ]
        if any(isinstance(p, DTensor) for group in groups for p in group["params"]):
            raise UserError("model.optimizer: got muon, which does not support sharded parameters; use adamw")
        return groups

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradient by its global norm and log the norm. A value of null or 0 means no clipping.

        Lightning's own clipping refuses a fused optimiser with bf16, although bf16 has no loss scaling.
        """
        if not gradient_clip_val:
            return
        valid = gradient_clip_algorithm in (None, "norm")
        require(valid, "trainer.gradient_clip_algorithm", repr(gradient_clip_algorithm), "'norm'")
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)
        self.log("train/gradient_norm", full_tensor(norm))


def lr_multiplier(step: int, name: ScheduleName, warmup: int, end: int, final: float, decay: float) -> float:
    """Return the learning rate at a step, as a fraction of its peak.

    The rate rises linearly from 1 / warmup to 1 in the first ``warmup`` steps. After these steps, ``cosine`` and
    ``linear`` decrease to ``final`` at ``end``. ``wsd`` (warm-up, stable, decay: Hu et al. 2024, arXiv 2404.06395)
    stays at 1, and decreases linearly to ``final`` in the last fraction ``decay`` of all steps. ``constant`` stays
    at 1.

    Args:
        step: Number of optimiser steps before this one.
        name: Name of the schedule.
        warmup: Number of steps in which the rate rises, at least 2.
        end: Step at which the rate has decreased to ``final``, larger than ``warmup``.
        final: Fraction of the peak at the end, in [0, 1].
        decay: Fraction of all steps in which ``wsd`` decreases, in (0, 1].
    """
    if step < warmup:
        return (1 + step) / warmup
    progress = min(1.0, (step - warmup) / (end - warmup))
    height = {
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "linear": 1 - progress,
        "wsd": min(1.0, max(0, end - step) / (decay * end)),
        "constant": 1.0,
    }[name]
    return final + (1 - final) * height
