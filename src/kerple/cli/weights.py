"""`fit --weights PATH`: training that starts from the weights of another model, whose strategy may be replaced."""

import argparse
from functools import lru_cache
from typing import Any
from zipfile import is_zipfile

import yaml
from pytorch_lightning import LightningDataModule

from kerple.base.errors import UserError
from kerple.base.trust import load
from kerple.cli.classes import classes
from kerple.data import TokenShards
from kerple.model import Transformer
from kerple.model.stored import fill

DATA_OPTIONS = ("length", "vocabulary")  # the model takes these from the data


@lru_cache(maxsize=1)  # it is called twice: for the options, then for the weights
def _read(path: str, trust: str) -> Any:
    from kerple.hf.pretrained import read_stored_model  # imports transformers, which takes seconds

    try:
        return read_stored_model(path, classes(trust))
    except UserError as error:  # it names the option --hf of `test`
        raise UserError(f"weights: {str(error).removeprefix('hf: ')}") from error


def architecture_first(arguments: list[str], path: str, trust: str | None = None) -> list[str]:
    """Insert a model's architecture after the configuration files, which it replaces, and before the flags.

    Args:
        arguments: Arguments of ``fit``, without the command.
        path: Path or name of the model, see `kerple.hf.pretrained.read_stored_model`.
        trust: Packages whose classes a checkpoint may name, separated by commas.

    Returns:
        The arguments with the architecture.

    Raises:
        UserError: If the model cannot be read.
    """
    stored = {key: value for key, value in _read(path, trust or "").model.items() if key not in DATA_OPTIONS}
    model = {"qk_norm": False} | stored  # published models have no such norms, which a file may ask for
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", "-c", action="append", default=[])
    files, flags = parser.parse_known_args(arguments)
    return [*(f"--config={file}" for file in files.config), "--config", yaml.safe_dump({"model": model}), *flags]


def start_from(network: Transformer, data: LightningDataModule, path: str, trust: str | None = None) -> None:
    """Copy a model's weights into a network, and print what was copied, what is new and what was left out.

    Raises:
        UserError: If a weight other than the strategy's does not fit, or the data has another tokenizer than the model.
    """
    from kerple.hf.model_tokenizer import check_tokenizer
    from kerple.hf.source import find_model

    if isinstance(data, TokenShards):
        data.prepare_data()
        if is_zipfile(path):  # a checkpoint, which has checksums of its data
            states = load(path)
            data.load_state_dict(states.get(type(data).__qualname__) or states.get("TokenShards") or {})
        else:
            check_tokenizer(data.folder, find_model(path))
    print(f"weights of {path}:\n{fill(network, _read(path, trust or ''))}", flush=True)
    _read.cache_clear()
