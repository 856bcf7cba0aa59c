"""Pretrained models, read as a network to measure, or as options and weights of our own `Transformer`."""

from collections.abc import Mapping
from typing import Any
from zipfile import is_zipfile

import torch

from kerple.base.errors import UserError, require
from kerple.config.untrusted_checkpoints import Classes
from kerple.hf import need
from kerple.hf.adapter import hugging_face_network
from kerple.hf.memory import check_memory
from kerple.hf.position_limit import config_length, known_length
from kerple.hf.pretrained_files import find_model, read_model, read_model_config
from kerple.hf.pretrained_tokenizer import bos_token, has_tokenizer
from kerple.hf.rope import STRATEGIES, scaled
from kerple.hf.translation_from_transformers import read_family
from kerple.model.stored_model import StoredModel, build_transformer, check_wrapped, copy_weights, read_checkpoint
from kerple.positions import StrategyBuilder
from kerple.positions.rotary_scaling import AnyScaling


def read_network(
    path: str,
    length: int | None = None,
    scaling: AnyScaling | None = None,
    factor: float | None = None,
    position: StrategyBuilder | None = None,
    dtype: str = "float32",
    trust_remote_code: bool = False,
    bos: bool = True,
    rope_options: Mapping[str, float] = {},
) -> Any:
    """Read a causal language model of transformers as a `kerple.model.network.Network`.

    Args:
        path: A folder, a .gguf file, ``smollm2-135m`` or a name on the Hugging Face hub.
        length: Training length in tokens; None for the length in the model's configuration.
        scaling: Scaling of RoPE, see `kerple.hf.rope.scaled`; None for the model's own.
        factor: Scaling factor. It must be None if ``scaling`` is None or the string ``none``.
        position: Function that builds another strategy from a `kerple.positions.Shape`; None for the model's own. With
            another strategy, the model is translated to our `Transformer`, in fp32.
        dtype: Dtype of the weights in memory, if the model is not translated.
        trust_remote_code: Whether code that is stored with the model may run.
        bos: Whether the network reads a BOS token before every input, if the model's tokenizer adds one.
        rope_options: Further entries of ``rope_parameters`` for the scaling, such as ``beta_fast``.

    Raises:
        UserError: If the model cannot be read, its RoPE cannot be scaled or is replaced, its family has no translation,
            or the strategy has parameters that the model lacks or wraps another one than that of the model.
    """
    given, expected = f"{scaling} and factor {factor} with model.position", "null, because the strategy replaces RoPE"
    require(position is None or scaling is factor is None, "model.scaling", given, expected)
    source = find_model(path)
    config = read_model_config(source, trust_remote_code)
    exported = config.model_type in ("kerple", "kerple_remote")
    training_length = known_length(config, length, "model.length", fixed=exported and position is None)
    config = scaled(config, scaling, factor, training_length or 0, rope_options)
    model = read_model(source, config, getattr(torch, dtype), trust_remote_code)
    advice = "; test --hf measures without them if model.bos is false"
    bos_id = bos_token(source, advice) if bos and has_tokenizer(source) else None
    if position is None and config.model_type == "kerple_remote":  # exported, with code of its own strategy
        model.network.bos = bos_id
        return model.network
    if position is None and not exported:
        return hugging_face_network(model, training_length, None if scaling is None else STRATEGIES[scaling], bos_id)
    stored = read_family(config, model.state_dict())
    network = build_transformer(stored.model | ({"length": length} if length else {}), position)
    check_wrapped(network, stored.model)
    if new := [name for name in copy_weights(network, stored).new if name.startswith("positions.")]:
        reason = f"which has parameters that the model lacks, such as {new[0]}"
        raise UserError(f"model.position: got {network.name}, {reason}; train them with `fit --weights`")
    network.bos = bos_id
    if position is not None:
        print(f"the strategy of the model is replaced by {network.name}", flush=True)
    return network.eval()


def read_stored_model(path: str, classes: Classes | None = None) -> StoredModel:
    """Read a model as options and weights of our own `Transformer`.

    Args:
        path: A name for `find_model`, or a checkpoint that `fit` has written.
        classes: The only classes that a checkpoint is allowed to use; None if ``path`` is not a checkpoint.

    Raises:
        UserError: If the model cannot be read, its family has no translation, or the checkpoint contains no model.
    """
    if classes is not None and is_zipfile(path):  # checkpoints are zip files; safetensors and GGUF files are not
        return read_checkpoint(path, classes)
    source = find_model(path)
    config = read_model_config(source)
    return read_family(config, read_model(source, config).state_dict())


def read_fp32_model(
    path: str,
    classes: Classes | None = None,
    trust_remote_code: bool = False,
    scaling: AnyScaling | None = None,
    factor: float | None = None,
) -> tuple[Any, Any]:
    """Read a model as a `transformers.PreTrainedModel` in fp32, and the configuration of its text model.

    Args:
        path: A name for `find_model`, or a checkpoint that `fit` has written.
        classes: The only classes that a checkpoint is allowed to use; None if ``path`` is not a checkpoint.
        trust_remote_code: Whether code in the model's folder may run.
        scaling: Scaling of RoPE, see `kerple.hf.rope.scaled`; None for the model's own. A checkpoint must have None.
        factor: Scaling factor, see `kerple.hf.rope.scaled`. A checkpoint must have None.

    Raises:
        UserError: If the model does not exist, cannot be read, or does not fit into memory, or its RoPE cannot be
            scaled.
    """
    need()
    if classes is not None and is_zipfile(path):
        from kerple.hf.exporter import hugging_face_model  # imports transformers, which may not be installed

        for name, value in (("scaling", scaling), ("factor", factor)):
            require(value is None, name, value, "null for a checkpoint")
        model = hugging_face_model(read_checkpoint(path, classes))
        return model, model.config
    source = find_model(path)
    config = read_model_config(source, trust_remote_code)
    config = scaled(config, scaling, factor, config_length(config) or 0)
    check_memory(config, trust_remote_code=trust_remote_code)
    return read_model(source, config, trust_remote_code=trust_remote_code), config.get_text_config()
