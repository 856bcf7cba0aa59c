"""Folders that transformers loads, made from a model on the disk: with another configuration, or from a GGUF file."""

import shutil
from pathlib import Path
from typing import Any

from kerple.hf.source import ModelSource, read_model


def link(model: str, config: Any, folder: Path) -> None:
    """Make a folder with a changed configuration and links to the other files of a model.

    Args:
        model: A folder or a name on the hub.
        config: The `transformers.PreTrainedConfig`.
        folder: The folder; its previous contents are removed.
    """
    from transformers.utils import cached_file

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in Path(str(cached_file(model, "config.json"))).parent.iterdir():
        if file.is_file() and file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    config.save_pretrained(folder)


def unpack(source: ModelSource, config: Any, folder: Path) -> str:
    """Write the model of a GGUF file as safetensors with its tokenizer, and return the path of the folder.

    Args:
        source: The GGUF file.
        config: Its `transformers.PreTrainedConfig`, which `read_model_config` returns.
        folder: The folder; it is not written again if it is complete.

    Raises:
        UserError: If the model cannot be read.
    """
    from transformers import AutoTokenizer

    if not (folder / "tokenizer.json").exists():  # is written last
        model = read_model(source, config)
        model.hf_quantizer = None  # the weights are unpacked, but transformers refuses to save a quantised model
        del model.config.quantization_config
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(source.location, **source.files).save_pretrained(folder)
    return str(folder)
