"""Typed access to the network, data module and trainer that Lightning hands to callbacks."""

from typing import Any, cast

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.strategies import FSDPStrategy

from kerple.base.errors import UserError
from kerple.model import Transformer


def network_of(pl_module: LightningModule) -> Transformer:
    """The network of `kerple.training.language_model.LanguageModel`.

    That of a pretrained model, `kerple.hf.adapter.HuggingFaceNetwork`, has as much of it as the callbacks use that are
    offered for such models.
    """
    return cast(Transformer, pl_module.network)


def data_of(trainer: Trainer) -> Any:
    """The data module of a run."""
    return untyped(trainer).datamodule


def refuse_shards(trainer: Trainer, callback: str, advice: str) -> None:
    """Raise a UserError where the network's parameters are in shards, whole only inside of their own forward pass."""
    if isinstance(trainer.strategy, FSDPStrategy):
        raise UserError(
            f"trainer.callbacks: got {callback} with parameters in shards (FSDP), expected it in tests alone, on one "
            f"device; {advice}, and test the checkpoint afterwards"
        )


def untyped(trainer: Trainer) -> Any:
    """The trainer, with what its connectors set: ``callbacks``, ``log_every_n_steps`` and more."""
    return trainer
