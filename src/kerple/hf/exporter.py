"""Export of a network to a folder that transformers loads: as a stock model if possible, else as our own class."""

import json
import re
import sys
from inspect import getsourcefile
from pathlib import Path
from shutil import copy
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer

from kerple.base.errors import UserError
from kerple.hf.families import LLAMA
from kerple.hf.modeling import KerpleConfig, KerpleForCausalLM, remote_classes
from kerple.hf.translation import parameters
from kerple.model.architecture import Architecture
from kerple.model.stored import StoredModel, Weights
from kerple.positions import Position
from kerple.positions.coupled import PlaceEmbedding

TRAINED_ON = "kerple_trained_on"
"""Key of config.json for the corpus of the exported run and the sha256 of its test text."""

ANY_VALUE = ("kv_heads", "per_layer", "hidden", "qkv_bias", "tied", "eps", "init", "dropout", "attention")
"""Options that a stock Llama or Qwen2 has in its configuration, or that do not change logits."""
AS_LLAMA = {name: value for name, value in vars(Architecture()).items() if name not in ANY_VALUE}
AS_LLAMA |= {"bias": False, "norm": "rms", "gated": True, "activation": "silu"}
"""The other options of a stock Llama."""
ROPE_AS_LLAMA: dict[str, Any] = {"layout": "half", "rotary_fraction": 1.0}
ROPE_AS_LLAMA |= dict.fromkeys(("scaling", "attention_factor", "mistake"))
"""Options of `kerple.positions.RoPE` in a stock Llama, except ``base``, which is an entry of its configuration."""
AUTO_MAP = {"AutoConfig": "modeling_kerple.KerpleRemoteConfig"}
AUTO_MAP |= {"AutoModelForCausalLM": "modeling_kerple.KerpleRemoteForCausalLM"}
REMOTE_CODE = '''"""A model of kerple with the strategies in this folder; kerple has to be installed."""

from kerple.hf.modeling import remote_classes

{imports}
KerpleRemoteConfig, KerpleRemoteForCausalLM = remote_classes(__name__, {names})
'''


def export(
    stored: StoredModel, folder: Path, tokenizer: Tokenizer | None, end_of_text: int | None, dtype: str = "float32"
) -> str:
    """Write config.json, model.safetensors and the tokenizer.

    A network that equals a Llama, or a Qwen2 with biases of queries, keys and values, is written as such a model. It
    needs no code of this project. Files of strategies from outside this project are copied into the folder, as code
    that transformers runs only with ``trust_remote_code=True``.

    Args:
        stored: Options and weights of the network.
        folder: A folder that is empty or does not exist.
        tokenizer: Tokenizer of the training data, or None.
        end_of_text: Id of the token that ends a text, or None.
        dtype: Dtype of the weights. Weights of the strategy stay in fp32.

    Returns:
        Name of the architecture.

    Raises:
        UserError: If the folder is not empty, or the strategy needs positions that a task gives.
    """
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"to: got {folder}, which is not empty; name a new folder")
    remote = _remote(stored.model["position"])
    model = hugging_face_model(stored)
    if end_of_text is not None:
        model.config.eos_token_id = model.generation_config.eos_token_id = end_of_text
    for weight_name, weight in model.named_parameters():
        if "positions." not in weight_name:
            weight.data = weight.data.to(getattr(torch, dtype))
    model.save_pretrained(folder)
    if tokenizer is not None:
        end = None if end_of_text is None else tokenizer.id_to_token(end_of_text)
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end).save_pretrained(folder)
    for kind in remote:
        copy(str(getsourcefile(kind)), folder)
    if remote:
        imports = [f"from .{kind.__module__.rpartition('.')[2]} import {kind.__name__}" for kind in remote]
        code = REMOTE_CODE.format(imports="\n".join(imports), names=", ".join(kind.__name__ for kind in remote))
        (folder / "modeling_kerple.py").write_text(code, encoding="utf-8")
    return type(model).__name__


def hugging_face_model(stored: StoredModel) -> Any:
    """The network as a Llama or Qwen2 of transformers if it equals one, else as our own class; errors of `export`."""
    position, remote = stored.model["position"], _remote(stored.model["position"])
    position = {"class_path": position} if isinstance(position, str) else position
    rope = position.get("init_args") or {}
    is_llama = position["class_path"].rpartition(".")[2] == "RoPE" and not remote
    is_llama = is_llama and ROPE_AS_LLAMA.items() <= (ROPE_AS_LLAMA | rope).items()
    is_llama = is_llama and AS_LLAMA.items() <= (vars(Architecture()) | dict(stored.model)).items()
    return _llama(stored, rope.get("base", 10000.0)) if is_llama else _kerple(stored, remote)


def _remote(position: Any) -> list[type[Position]]:
    """The strategies from outside this project; reading the model has imported their modules."""
    paths = dict.fromkeys(re.findall(r'"class_path": "([^"]+)\.(\w+)"', json.dumps(position)))
    return [getattr(sys.modules[module], name) for module, name in paths if module.split(".")[0] != "kerple"]


def _kerple(stored: StoredModel, remote: list[type[Position]]) -> KerpleForCausalLM:
    rows = len(stored.weights["embedding.weight"])
    options = {key: value for key, value in stored.model.items() if key not in ("vocabulary", "attention", "dropout")}
    config_class, model_class = remote_classes(__name__, *remote) if remote else (KerpleConfig, KerpleForCausalLM)
    exported = model_class(config_class({**options, "vocabulary": rows}))
    for module in exported.network.modules():
        if isinstance(module, PlaceEmbedding):
            reason = "whose positions a task gives, but models of transformers read only tokens"
            raise UserError(f"model.position: got {type(module).__name__}, {reason}; use `python run.py predict`")
    exported.network.load_state_dict(stored.weights)
    for kind in remote:  # transformers imports the file into its package transformers_modules
        exported.config.auto_map, network = AUTO_MAP, json.dumps(exported.config.network)
        network = network.replace(f'"{kind.__module__}.{kind.__name__}"', f'"transformers_modules.{kind.__name__}"')
        exported.config.network = json.loads(network)
    return exported.eval()


def _llama(stored: StoredModel, base: float) -> Any:
    model, weights = stored.model, stored.weights
    heads, dim = model["heads"], model["dim"]
    kv_heads = model.get("kv_heads") or heads
    config = (transformers.Qwen2Config if model.get("qkv_bias") else transformers.LlamaConfig)(
        vocab_size=len(weights["embedding.weight"]),
        hidden_size=dim,
        intermediate_size=model.get("hidden") or 4 * dim,
        num_hidden_layers=model["layers"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=model["length"],
        rms_norm_eps=model["eps"],
        tie_word_embeddings=bool(model.get("tied")),
        rope_parameters={"rope_type": "default", "rope_theta": float(base)},
        bos_token_id=None,
        eos_token_id=None,
    )
    rows = [dim, kv_heads * dim // heads, kv_heads * dim // heads]  # of queries, keys and values
    state: Weights = {}
    for ours, theirs in parameters(LLAMA, model["layers"]):
        if ours in weights:
            parts = weights[ours].split(rows) if len(theirs) == 3 else [weights[ours]]
            state |= zip(theirs, parts, strict=True)
    llama = transformers.AutoModelForCausalLM.from_config(config)
    llama.load_state_dict(state)
    return llama.eval()
