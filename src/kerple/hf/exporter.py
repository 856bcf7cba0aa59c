"""Export of a network of this project to a folder that transformers loads, if possible as a Llama or Qwen2."""

import ast
import json
import re
import sys
from collections.abc import Mapping
from importlib.metadata import packages_distributions
from inspect import getsourcefile
from pathlib import Path
from shutil import copy
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer

from kerple.base.atomic import new_folder
from kerple.base.errors import UserError, require
from kerple.hf.model_folder import add_transformers_4_entries, save_tokenizer
from kerple.hf.modeling import KerpleConfig, KerpleForCausalLM, cast_parameters, remote_classes
from kerple.hf.translation_from_transformers import parameters
from kerple.hf.translation_tables import LLAMA
from kerple.model.architecture import Architecture
from kerple.model.stored_model import StoredModel, Weights, class_name
from kerple.positions import Position
from kerple.positions.position_coupling import PlaceEmbedding

TRAINED_ON = "kerple_trained_on"
"""Key of config.json for the corpus of the exported run and the sha256 of its test text."""

FREE_OPTIONS = ("kv_heads", "per_layer", "hidden", "qkv_bias", "tied", "eps", "init", "dropout", "attention")
"""Options of `Architecture` that may have any value in a Llama or Qwen2, or that do not change logits."""
LLAMA_OPTIONS = {name: value for name, value in vars(Architecture()).items() if name not in FREE_OPTIONS}
LLAMA_OPTIONS |= {"bias": False, "norm": "rms", "gated": True, "activation": "silu"}
"""Values of all other options in a Llama or Qwen2."""
LLAMA_ROPE = {"layout": "half", "rotary_fraction": 1.0, "scaling": None, "attention_factor": None, "mistake": None}
"""Options of `kerple.positions.RoPE` in a Llama or Qwen2. Only ``base`` may have any value."""
AUTO_MAP = {"AutoConfig": "modeling_kerple.KerpleRemoteConfig"}
AUTO_MAP |= {"AutoModelForCausalLM": "modeling_kerple.KerpleRemoteForCausalLM"}
REMOTE_CODE = '''"""Model classes for the strategies in this folder. The package kerple must be installed."""

from kerple.hf.modeling import remote_classes

{imports}
KerpleRemoteConfig, KerpleRemoteForCausalLM = remote_classes(__name__, {names})
'''


def export(
    stored: StoredModel,
    folder: Path,
    tokenizer: Tokenizer | None,
    end_of_text: int | None,
    dtype: str = "float32",
    trained_on: Mapping[str, Any] = {},
    card: str = "",
) -> str:
    """Write config.json, model.safetensors, the tokenizer and README.md.

    A network that equals a Llama or a Qwen2 is written as such a model, and transformers loads it without this project.
    The files of strategies from outside this project are copied into the folder. transformers runs their code only with
    ``trust_remote_code=True``.

    Args:
        stored: Options and weights of the network.
        folder: A folder that is empty or does not exist.
        tokenizer: Tokenizer of the training data, or None.
        end_of_text: Id of the token that ends a text, or None.
        dtype: Dtype of the weights. Weights of the strategy stay in fp32.
        trained_on: Value of the key `TRAINED_ON` of config.json; empty for no such key.
        card: Content of README.md; empty for no such file.

    Returns:
        Name of the model's class.

    Raises:
        UserError: If the folder is not empty or cannot be made, or `hugging_face_model` raises an error.
    """
    model = hugging_face_model(stored)
    external = getattr(model, "remote", ())
    if end_of_text is not None:
        model.config.eos_token_id = model.generation_config.eos_token_id = end_of_text
    if trained_on:
        setattr(model.config, TRAINED_ON, dict(trained_on))
    cast_parameters(model, getattr(torch, dtype))
    with new_folder("output", folder) as unfinished:
        model.save_pretrained(unfinished)
        for weights in unfinished.glob("*.safetensors"):  # only the owner can read what safetensors writes
            weights.chmod(unfinished.stat().st_mode & 0o666)
        add_transformers_4_entries(model.config, unfinished)
        if tokenizer is not None:
            end = None if end_of_text is None else tokenizer.id_to_token(end_of_text)
            save_tokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end), unfinished)
        files = {strategy: strategy.__module__.rpartition(".")[2] for strategy in external}
        for strategy, name in files.items():
            copy(str(getsourcefile(strategy)), unfinished / f"{name}.py")
        if external:
            imports = [f"from .{name} import {strategy.__name__}" for strategy, name in files.items()]
            code = REMOTE_CODE.format(imports="\n".join(imports), names=", ".join(s.__name__ for s in external))
            (unfinished / "modeling_kerple.py").write_text(code, encoding="utf-8")
        if card:
            (unfinished / "README.md").write_text(card, encoding="utf-8")
    return type(model).__name__


def hugging_face_model(stored: StoredModel) -> Any:
    """Return the network as a model of transformers.

    A network with the architecture of Llama becomes a Llama. If it also has biases of queries, keys and values
    (``qkv_bias``), it becomes a Qwen2. All other networks become a `KerpleForCausalLM`.

    Raises:
        UserError: If the strategy needs places from a task, such as the places of digits in numbers (`PlaceEmbedding`).
    """
    position = stored.model["position"]
    position = {"class_path": position} if isinstance(position, str) else position
    external = _external_strategies(position)
    rope = position.get("init_args") or {}
    is_llama = class_name(position) == "RoPE" and not external
    is_llama = is_llama and LLAMA_ROPE.items() <= (LLAMA_ROPE | rope).items()
    is_llama = is_llama and LLAMA_OPTIONS.items() <= (vars(Architecture()) | dict(stored.model)).items()
    return _llama(stored, rope.get("base", 10000.0)) if is_llama else _kerple(stored, external)


def _external_strategies(position: Any) -> dict[str, type[Position]]:
    """Return the strategies from outside this project by class path; reading the model has imported their modules.

    Raises:
        UserError: If a strategy is inside another class, so that no copied file could define it, or two classes or
            files have the same name.
    """
    paths = dict.fromkeys(re.findall(r'"class_path": "([^"]+)\.(\w+)"', json.dumps(position)))
    for module, name in paths:
        require(module in sys.modules, "model.position", f"{module}.{name}", "a class at the top level of its file")
    own = [(module, name) for module, name in paths if module.split(".")[0] != "kerple"]
    external = {f"{module}.{name}": getattr(sys.modules[module], name) for module, name in own}
    classes, modules = {*external.values()}, {strategy.__module__ for strategy in external.values()}
    names = [c.__name__ for c in classes], [module.rpartition(".")[2] for module in modules]
    for kind, given in zip(("classes", "files"), names, strict=True):
        twice = sorted({name for name in given if given.count(name) > 1})
        require(not twice, "model.position", f"two {kind} with the name {', '.join(twice)}", "different names")
    for strategy in classes:
        _check_imports(Path(str(getsourcefile(strategy))))
    return external


def _check_imports(file: Path) -> None:
    """Raise a UserError if a file imports a module that is neither installed nor copied with the file."""
    installed = {*sys.stdlib_module_names, *packages_distributions(), "kerple"}
    names = []
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append("." * node.level + (node.module or ""))
    for name in names:
        expected = "a file that imports only installed packages; put the code of the strategy into one file"
        given = f"{file.name}, which imports {name}"
        require(name.partition(".")[0] in installed, "model.position", given, expected)


def _kerple(stored: StoredModel, external: dict[str, type[Position]]) -> KerpleForCausalLM:
    """Return the network as a `KerpleForCausalLM` that refers to the files of strategies from outside this project."""
    rows = len(stored.weights["embedding.weight"])
    options = {key: value for key, value in stored.model.items() if key not in ("vocabulary", "attention", "dropout")}
    classes = {*external.values()}
    config_class, model_class = remote_classes(__name__, *classes) if external else (KerpleConfig, KerpleForCausalLM)
    exported = model_class(config_class({**options, "vocabulary": rows}))
    for module in exported.network.modules():
        if isinstance(module, PlaceEmbedding):
            reason = "which needs the places that a task assigns, such as digit places; transformers passes only tokens"
            raise UserError(f"model.position: got {type(module).__name__}, {reason}; use `python run.py predict`")
    exported.network.load_state_dict(stored.weights)
    network = json.dumps(exported.config.network)
    # transformers imports the copied files into its package transformers_modules
    for path, strategy in external.items():
        network = network.replace(f'"{path}"', f'"transformers_modules.{strategy.__name__}"')
    if external:
        exported.config.auto_map = AUTO_MAP
        exported.config.network = json.loads(network)
    return exported.eval()


def _llama(stored: StoredModel, base: float) -> Any:
    """Return the network as a Llama, or as a Qwen2 if it has ``qkv_bias``; ``base`` is the base of its RoPE."""
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
            state |= zip(theirs, weights[ours].split(rows) if len(theirs) == 3 else [weights[ours]], strict=True)
    llama = transformers.AutoModelForCausalLM.from_config(config)
    llama.load_state_dict(state)
    return llama.eval()
