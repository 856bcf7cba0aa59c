"""`fit --weights PATH`: training that starts from the weights of another model, whose strategy may be replaced."""

from functools import lru_cache
from typing import Any
from zipfile import is_zipfile

import yaml
from pytorch_lightning import LightningDataModule

from kerple.base.untrusted_checkpoints import load
from kerple.cli.allowed_classes import allowed_classes
from kerple.cli.option_parsing import name_in_errors, split_options
from kerple.data import TokenShards
from kerple.model import Transformer
from kerple.model.options_and_weights import copy_weights

DATA_OPTIONS = ("length", "vocabulary")  # options of the model that the data determines


@lru_cache(maxsize=1)  # a fit calls this function twice: for the options of the model, and later for the weights
@name_in_errors("weights")
def _read(path: str, trust: str) -> Any:
    from kerple.hf.pretrained_model_reader import read_stored_model  # imports transformers, which takes seconds

    return read_stored_model(path, allowed_classes(trust))


def insert_architecture(arguments: list[str], path: str, trust: str | None = None) -> list[str]:
    """Insert the architecture of a model between the configuration files and the other arguments of ``fit``.

    The architecture takes precedence over the files. The other arguments take precedence over the architecture.

    Args:
        arguments: Arguments of ``fit``, without the command.
        path: Path or name of the model, see `kerple.hf.pretrained_model_reader.read_stored_model`.
        trust: Packages whose classes a checkpoint may use, separated by commas.

    Returns:
        The arguments with the architecture.

    Raises:
        UserError: If the model cannot be read.
    """
    stored = {key: value for key, value in _read(path, trust or "").model.items() if key not in DATA_OPTIONS}
    # a file such as configs/demo.yaml may set qk_norm, but a model whose options do not mention it has no such norms
    model = {"qk_norm": False} | stored
    files, flags = split_options(arguments)
    return [*(f"--config={file}" for file in files.config), "--config", yaml.safe_dump({"model": model}), *flags]


def load_initial_weights(network: Transformer, data: LightningDataModule, path: str, trust: str | None = None) -> None:
    """Copy the weights of a model into a network, and print the copied, new and unused weights.

    Args:
        network: The network to train.
        data: Data of the training. Its tokenizer must be that of the model.
        path: Path or name of the model, see `kerple.hf.pretrained_model_reader.read_stored_model`.
        trust: Packages whose classes a checkpoint may use, separated by commas.

    Raises:
        UserError: If a weight outside the strategy is missing, a weight has another shape, or the tokenizer of the data
            differs.
    """
    from kerple.hf.pretrained_files import check_tokenizer, find_model, has_tokenizer, read_tokenizer

    if isinstance(data, TokenShards):
        if not is_zipfile(path) and has_tokenizer(source := find_model(path)):
            with name_in_errors("weights"):
                read_tokenizer(source)  # reports an id outside the embedding before the preparation
        data.prepare_data()
        if is_zipfile(path):  # a checkpoint has a checksum of the tokenizer, which `load_state_dict` compares
            states = load(path)
            data.load_state_dict(states.get(type(data).__qualname__) or states.get("TokenShards") or {})
        else:
            with name_in_errors("weights"):
                check_tokenizer(data.folder, find_model(path))
    print(f"weights of {path}:\n{copy_weights(network, _read(path, trust or ''))}", flush=True)
    _read.cache_clear()
