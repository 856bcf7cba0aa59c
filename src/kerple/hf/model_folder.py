"""Functions that make a folder for transformers: a model with a changed configuration, or a converted GGUF file."""

import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

from kerple.base.errors import UserError
from kerple.config.files import read_mapping
from kerple.hf.pretrained_files import ModelSource, read_model, snapshot_folder
from kerple.hf.rope import LENGTH, OPTIONS


def check_links(folder: Path, model: str) -> None:
    """Raise a UserError if a folder exists and is that of the model, or `link` has not made it."""
    written_by_others = [path for path in folder.glob("*") if not path.is_symlink() and path.name != "config.json"]
    if written_by_others or folder.resolve() == Path(model).resolve():
        raise UserError(f"output: {folder} exists and is not a result of this command; choose another folder")


def link(model: str, config: Any, folder: Path) -> None:
    """Make a folder with a changed configuration and links to the other files of a model.

    Args:
        model: Folder of the model, or its name on the hub.
        config: The changed `transformers.PreTrainedConfig`.
        folder: Folder to make; one of an earlier call is replaced.

    Raises:
        UserError: If a folder of another origin exists.
    """
    check_links(folder, model)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in snapshot_folder(model).iterdir():
        if file.is_file() and file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    config.save_pretrained(folder)
    add_transformers_4_entries(config, folder)


def add_transformers_4_entries(config: Any, folder: Path) -> None:
    """Add the entries from which transformers 4 and vLLM read RoPE to config.json, such as ``rope_theta``.

    transformers 5 writes ``rope_parameters`` only, and prefers the other entries when it reads both. They are therefore
    added only if transformers 5 then reads the same ``rope_parameters``. For models with RoPE that differs between
    layers, transformers 4 has entries for Gemma 3 only.

    Args:
        config: The `transformers.PreTrainedConfig` in the folder.
        folder: The folder.
    """
    ropes = getattr(config, "rope_parameters", None) or {}
    rope = ropes.get("full_attention", {}) if config.model_type == "gemma3_text" else ropes
    if "rope_theta" not in rope:
        return
    floats = OPTIONS.keys() - {LENGTH}  # transformers 4 warns about integers
    scaling = {name: float(v) if name in floats and isinstance(v, int) else v for name, v in rope.items()}
    entries = {"rope_theta": scaling.pop("rope_theta")}
    if "partial_rotary_factor" in scaling:
        entries["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    if config.model_type.startswith("gpt_neox"):
        entries |= {"rotary_emb_base": entries["rope_theta"], "rotary_pct": entries["partial_rotary_factor"]}
    if config.model_type == "gemma3_text":
        entries["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
    if scaling.get("rope_type", "default") != "default":
        entries["rope_scaling"] = scaling
    if scaling.get("rope_type") == "longrope":
        entries[LENGTH] = scaling[LENGTH]
    if type(config).from_dict(deepcopy(config.to_dict() | entries)).rope_parameters == ropes:
        path = folder / "config.json"
        path.write_text(json.dumps(read_mapping(path) | entries, indent=2) + "\n", "utf-8")


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer of transformers. Its class gets the name of transformers 4, which transformers 5 reads too."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(path.read_text("utf-8").replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'), "utf-8")


def unpack(source: ModelSource, config: Any, folder: Path) -> str:
    """Write the model of a GGUF file, as safetensors, and its tokenizer to a folder; return the path of the folder.

    Nothing is written if an earlier call has completed the folder.

    Args:
        source: The GGUF file.
        config: Its `transformers.PreTrainedConfig`, which `read_model_config` returns.
        folder: The folder.

    Raises:
        UserError: If the model cannot be read.
    """
    from transformers import AutoTokenizer  # an optional package

    if not (folder / "tokenizer.json").exists():  # this file is written last
        model = read_model(source, config)
        # the weights are dequantised, but transformers refuses to save a model that names a quantiser
        model.hf_quantizer = None
        del model.config.quantization_config
        model.save_pretrained(folder)
        add_transformers_4_entries(model.config, folder)
        save_tokenizer(AutoTokenizer.from_pretrained(source.location, **source.files), folder)
    return str(folder)
