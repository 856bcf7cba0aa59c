"""Typed access to the network, data module and trainer that Lightning hands to callbacks."""

import math
from pathlib import Path
from typing import Any, cast

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.strategies import ModelParallelStrategy

from kerple.base.errors import UserError
from kerple.model import Transformer
from kerple.model.network import Limited, Network


def network_of(pl_module: LightningModule) -> Transformer:
    """The network of `kerple.training.language_model.LanguageModel`.

    A pretrained model has a `kerple.hf.adapter.HuggingFaceNetwork` instead, with the attributes and methods that the
    callbacks for such models use.
    """
    return cast(Transformer, pl_module.network)


def strategy_name(pl_module: LightningModule) -> str:
    """Name of the model's strategy: its class, or for a pretrained network the name that it gives."""
    return network_of(pl_module).name


def trained_with(pl_module: LightningModule) -> int:
    """Training length in tokens.

    Raises:
        UserError: If it is unknown.
    """
    length: int | None = network_of(pl_module).training_length
    if length is None:
        raise UserError("length: the model's configuration does not name its training length; give model.length")
    return length


def max_positions(network: Network) -> float:
    """Number of positions that the network can represent, or infinity if there is no limit."""
    limit = network.max_length if isinstance(network, Limited) else None
    return math.inf if limit is None else limit


def data_of(trainer: Trainer) -> Any:
    """The data module of a run."""
    return untyped(trainer).datamodule


def refuse_shards(trainer: Trainer, callback: str, advice: str) -> None:
    """Raise a UserError if FSDP has sharded the parameters, which are then whole only inside the forward pass."""
    if isinstance(trainer.strategy, ModelParallelStrategy):
        raise UserError(
            f"trainer.callbacks: got {callback} with parameters that FSDP has sharded, expected it only in tests, "
            f"on one device; {advice}, and test the checkpoint afterwards"
        )


def untyped(trainer: Trainer) -> Any:
    """The trainer without its type, which lacks the attributes ``callbacks``, ``log_every_n_steps`` and more."""
    return trainer


def log_directory(trainer: Trainer) -> Path:
    """The run's log directory, made if it is missing. Call it on every rank, because Lightning broadcasts the path."""
    directory = Path(trainer.log_dir or trainer.default_root_dir)
    if trainer.is_global_zero:
        directory.mkdir(parents=True, exist_ok=True)
    return directory
