"""Functions that make a folder for transformers: a model with a changed configuration, or a converted GGUF file."""

import shutil
from pathlib import Path
from typing import Any

from kerple.base.errors import UserError
from kerple.hf.pretrained_files import ModelSource, model_folder, read_model


def check_links(folder: Path, model: str) -> None:
    """Raise a UserError if a folder exists and is that of the model, or `link` has not made it."""
    written_by_others = [path for path in folder.glob("*") if not path.is_symlink() and path.name != "config.json"]
    if written_by_others or folder.resolve() == Path(model).resolve():
        raise UserError(f"run_dir: {folder} exists and is not a result of this command; choose another --run_dir")


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
    for file in model_folder(model).iterdir():
        if file.is_file() and file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    config.save_pretrained(folder)


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
    from transformers import AutoTokenizer

    if not (folder / "tokenizer.json").exists():  # this file is written last
        model = read_model(source, config)
        # the weights are dequantised, but transformers refuses to save a model that names a quantiser
        model.hf_quantizer = None
        del model.config.quantization_config
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(source.location, **source.files).save_pretrained(folder)
    return str(folder)
