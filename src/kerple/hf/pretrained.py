"""`Pretrained`: the Lightning module around a pretrained model of transformers, which is tested and not trained."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from pytorch_lightning import LightningModule
from torch import nn

from kerple.base.errors import UserError
from kerple.hf.adapter import HuggingFaceNetwork, hugging_face_network, training_length
from kerple.hf.families import read_family
from kerple.hf.rope_scaling import STRATEGIES, AnyScaling, scaled
from kerple.hf.source import check_tokenizer, locate, read_model, read_model_config
from kerple.hf.weights import fill, transformer
from kerple.model import Batch, Transformer
from kerple.positions import Position, Shape

LOOK_INSIDE = ("AttentionStatistics", "AttentionMaps", "Kernels", "FourTerms", "TaskAccuracy")


class Pretrained(LightningModule):
    """A causal language model of transformers, for `test` and its callbacks.

    Args:
        path: A folder, a .gguf file, ``smollm2-135m`` or a name on the Hugging Face hub.
        length: Training length in tokens; null for that in the model's configuration.
        scaling: Scaling of RoPE: ``none``, ``pi``, ``ntk``, ``dynamic_ntk``, ``yarn`` ``llama3``; null for its own.
        factor: Length for which the scaling is meant, as a multiple of the training length.
        position: Strategy in place of the model's own, without weights that the model lacks. The model is then tested
            as our own network, in fp32, as is one that this project has exported.
        dtype: Dtype of the weights in memory. Scores and losses are always fp32.
        trust_remote_code: Whether code that comes with the model may run.

    Raises:
        UserError: If there is no such model, or it does not support the scaling or the strategy.
    """

    def __init__(
        self,
        path: str,
        length: int | None = None,
        scaling: AnyScaling | None = None,
        factor: float | None = None,
        position: Callable[[Shape], Position] | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        self.source = locate(path)
        config = read_model_config(self.source, trust_remote_code)
        length = length or training_length(config)
        if scaling is not None or factor is not None:
            config = scaled(config, scaling, factor, length or 0)
        model = read_model(self.source, config, getattr(torch, dtype), trust_remote_code)
        self.network: nn.Module
        if position is not None or config.model_type == "kerple":
            self.network = _own_network(model, position)
        else:
            self.network = hugging_face_network(model, length, None if scaling is None else STRATEGIES[scaling])

    def setup(self, stage: str) -> None:
        trainer: Any = self.trainer  # its types do not have its callbacks
        inside = [type(c).__name__ for c in trainer.callbacks if type(c).__name__ in LOOK_INSIDE]
        if inside and isinstance(self.network, HuggingFaceNetwork):
            raise UserError(
                f"trainer.callbacks: {', '.join(inside)}: work only with this project's own Transformer, and "
                f"{self.source.name} is not one; leave them out"
            )
        check_tokenizer(trainer.datamodule, self.source)

    def test_step(self, batch: Batch, index: int) -> None:
        """Do nothing: callbacks use the test batches."""


def _own_network(model: Any, position: Callable[[Shape], Position] | None) -> Transformer:
    """A model of transformers as our own network, with its strategy or another.

    Raises:
        UserError: If the model has no counterpart here, or the strategy has weights that it lacks.
    """
    source = read_family(model.config, model.state_dict())
    network = transformer(source.model, position)
    if new := [name for name in fill(network, source).new if name.startswith("positions.")]:
        name = type(network.positions[0]).__name__
        raise UserError(f"model.position: {name} has weights that the model lacks, such as {new[0]}; train them first")
    if position is not None:
        print(f"tested with another strategy than the model's own: {type(network.positions[0]).__name__}", flush=True)
    return network
