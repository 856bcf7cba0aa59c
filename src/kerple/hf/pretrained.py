"""`Pretrained`: the options of `test --hf`, by which a model of transformers becomes a network to measure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from kerple.base.errors import UserError
from kerple.hf.rope_scaling import STRATEGIES, AnyScaling, scaled
from kerple.hf.source import locate, read_model, read_model_config
from kerple.positions import Position, Shape


@dataclass
class Pretrained:
    """How to read a causal language model of transformers.

    Args:
        length: Training length in tokens; null for that in the model's configuration.
        scaling: Scaling of RoPE: ``none``, ``pi``, ``ntk``, ``dynamic_ntk``, ``yarn`` ``llama3``; null for its own.
        factor: Length for which the scaling is meant, as a multiple of the training length.
        position: Strategy in place of the model's own, without weights that the model lacks. The model is then tested
            as our own network, in fp32, as is one that this project has exported.
        dtype: Dtype of the weights in memory. Scores and losses are fp32 or better.
        trust_remote_code: Whether code that comes with the model may run.
    """

    length: int | None = None
    scaling: AnyScaling | None = None
    factor: float | None = None
    position: Callable[[Shape], Position] | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    trust_remote_code: bool = False

    def network(self, path: str) -> Any:
        """Read the model, as a `kerple.model.network.Network`.

        Args:
            path: A folder, a .gguf file, ``smollm2-135m`` or a name on the Hugging Face hub.

        Raises:
            UserError: If there is no such model, or it does not support the scaling or the strategy.
        """
        from kerple.hf.adapter import config_length, hugging_face_network
        from kerple.hf.families import read_family
        from kerple.hf.weights import fill, transformer

        source = locate(path)
        config = read_model_config(source, self.trust_remote_code)
        length = self.length or config_length(config)
        if self.scaling is not None or self.factor is not None:
            config = scaled(config, self.scaling, self.factor, length or 0)
        model = read_model(source, config, getattr(torch, self.dtype), self.trust_remote_code)
        if self.position is None and config.model_type != "kerple":
            return hugging_face_network(model, length, None if self.scaling is None else STRATEGIES[self.scaling])
        stored = read_family(config, model.state_dict())
        network = transformer(stored.model, self.position)
        if new := [name for name in fill(network, stored).new if name.startswith("positions.")]:
            raise UserError(
                f"model.position: {network.name} has weights that the model lacks, such as {new[0]}; train them first"
            )
        if self.position is not None:
            print(f"tested with another strategy than the model's own: {network.name}", flush=True)
        return network
