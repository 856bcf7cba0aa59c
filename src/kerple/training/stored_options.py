"""Options and weights that a stored model determines: a checkpoint of a test, or the initial weights of a fit."""

from functools import lru_cache
from os.path import abspath, isfile, realpath
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import yaml
from pytorch_lightning import LightningDataModule

from kerple.base.errors import UserError, require
from kerple.base.run_folder import LAST, weights_file
from kerple.config.auto_precision import SAFE, emulated
from kerple.config.files import read_mapping
from kerple.config.flat_configuration import flat
from kerple.config.options import name_in_errors, split_options
from kerple.config.untrusted_checkpoints import load
from kerple.data import TokenShards
from kerple.model import Transformer
from kerple.model.stored_model import copy_weights
from kerple.training.allowed_classes import allowed_classes
from kerple.training.trainer import print_once

DATA_OPTIONS = ("length", "vocabulary")  # options of the model that the data determines

DIRECTORIES = ("data.directory", "data.init_args.directory")  # options that may be the URL of a folder of shards


def insert_stored_config(arguments: list[str]) -> list[str]:
    """Insert options that a stored model determines. Arguments of the user take precedence over them.

    For `test` and `validate`, the inserted options are the configuration in the checkpoint ``--ckpt_path``. For `fit`,
    they are the architecture of the model ``--weights``, if this option is given or in a configuration file. If a fit
    continues in a folder that was moved, the paths in the ``config.yaml`` of the folder are replaced.

    Args:
        arguments: The command and its arguments.

    Returns:
        The command and its arguments, with an additional ``--config`` if there is a stored model.

    Raises:
        UserError: If the checkpoint does not exist or cannot be read, or ``--weights`` is given for `test` or
            `validate`.
    """
    command, *rest = arguments
    options, _ = split_options(rest, "ckpt_path", "weights", "trust", *DIRECTORIES)
    if command == "fit":
        in_files = _weights_in_files(options.config)
        weights = in_files.get("weights") if options.weights is None else options.weights
        if weights is not None:
            trust = in_files.get("trust") if options.trust is None else options.trust
            return [command, *insert_architecture(rest, weights, trust)]
        return [command, *_with_present_folder(rest, options.config, options.ckpt_path)]
    if {"-h", "--help"} & set(rest):
        return arguments
    advice = "--ckpt_path instead; --weights is for `fit` only"
    require(options.weights is None, "weights", options.weights, advice)
    advice = f"a checkpoint to {command}; add --ckpt_path FILE"
    require(options.ckpt_path is not None, "ckpt_path", "none", advice)
    # this configuration has no devices and no parallel strategy, because they depend on the machine
    given = [options.trust, *(vars(options)[name] for name in DIRECTORIES)]  # a URL that the user gives is trusted
    config = allowed_classes(",".join(filter(None, given))).config(options.ckpt_path)
    if emulated(precision := config["trainer"].get("precision")):
        config["trainer"]["precision"] = SAFE
        print_once(f"precision {SAFE}, because this machine emulates {precision}, in which the run was trained")
    return [command, "--config", yaml.safe_dump(config), *rest]


def _weights_in_files(files: list[str]) -> dict[str, str]:
    """Return the options ``weights`` and ``trust`` in configuration files, of which the last counts.

    The weights in the resolved configuration of a run, such as its ``config.yaml``, are left out, because this
    configuration already contains the architecture.

    Args:
        files: The values of ``--config``: paths of files, or YAML texts.
    """
    found: dict[str, Any] = {}
    for file in files:
        try:
            config = read_mapping(Path(file)) if isfile(file) else yaml.safe_load(file)
        except (UserError, RecursionError, yaml.YAMLError):  # the parser reports it
            continue
        config = config if isinstance(config, dict) else {}
        given = {name: config[name] for name in ("weights", "trust") if name in config}
        # only a resolved configuration has this option, because the folder of a run determines it
        if "weights" in given and "trainer.default_root_dir" in flat(config):
            given["weights"] = None
        found |= given
    return {name: value for name, value in found.items() if isinstance(value, str)}


def _with_present_folder(arguments: list[str], files: list[str], ckpt_path: str | None) -> list[str]:
    """Replace the stored path of a run's folder if ``--config`` is a file of this folder and the folder was moved.

    Without the replacement, the fit would continue in a new folder at the former place.

    Args:
        arguments: Arguments of `fit`.
        files: The values of ``--config``.
        ckpt_path: The value of ``--ckpt_path``. Only with ``last`` or a checkpoint of the folder, the run continues in
            the folder.
    """
    for file in files if ckpt_path else ():
        folder = Path(abspath(file)).parent
        continues = ckpt_path == "last" or folder in Path(abspath(str(ckpt_path))).parents
        # isfile returns False for a text, which --config accepts too
        if continues and isfile(file) and (folder / LAST.parent).is_dir():
            config = read_mapping(Path(file))
            stored = flat(config).get("trainer.default_root_dir")
            if isinstance(stored, str) and realpath(stored) != realpath(folder):
                text = yaml.safe_dump(_moved(config, stored, str(folder)) | {"output": str(folder)})
                replaced = {file: text, f"--config={file}": f"--config={text}"}
                return [replaced.get(argument, argument) for argument in arguments]
    return arguments


def _moved(node: Any, before: str, now: str) -> Any:
    """Return a configuration with ``now`` in place of ``before`` in all paths of this folder and below it."""
    if isinstance(node, dict):
        return {key: _moved(value, before, now) for key, value in node.items()}
    if isinstance(node, list):
        return [_moved(value, before, now) for value in node]
    is_below = isinstance(node, str) and f"{node}/".startswith(f"{before.rstrip('/')}/")
    return now + node[len(before.rstrip("/")) :] if is_below else node


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
        path: Folder of a run, or path or name of a model, see `kerple.hf.pretrained_model_reader.read_stored_model`.
        trust: Packages whose classes a checkpoint may use, separated by commas.

    Returns:
        The arguments with the architecture.

    Raises:
        UserError: If the model cannot be read.
    """
    options = _read(weights_file(path), trust or "").model
    stored = {key: value for key, value in options.items() if key not in DATA_OPTIONS}
    # a file such as configs/demo.yaml may set qk_norm, but a model whose options do not mention it has no such norms
    model = {"qk_norm": False} | stored
    files, flags = split_options(arguments)
    return [*(f"--config={file}" for file in files.config), "--config", yaml.safe_dump({"model": model}), *flags]


@name_in_errors("weights")
def load_initial_weights(network: Transformer, data: LightningDataModule, path: str, trust: str | None = None) -> None:
    """Copy the weights of a model into a network, and print the copied, new and unused weights.

    Args:
        network: The network to train.
        data: Data of the training. Its tokenizer must be that of the model.
        path: Folder of a run, or path or name of a model, see `kerple.hf.pretrained_model_reader.read_stored_model`.
        trust: Packages whose classes a checkpoint may use, separated by commas.

    Raises:
        UserError: If a weight outside the strategy is missing, a weight has another shape, or the tokenizer of the data
            differs.
    """
    path = weights_file(path)
    if isinstance(data, TokenShards) and is_zipfile(path):
        data.prepare_data()
        states = load(path)  # with a checksum of the tokenizer, which `load_state_dict` compares
        data.load_state_dict(states.get(type(data).__qualname__) or states.get("TokenShards") or {})
    elif isinstance(data, TokenShards):
        # imports transformers, which takes seconds
        from kerple.hf.pretrained_files import find_model
        from kerple.hf.pretrained_tokenizer import check_tokenizer, has_tokenizer, read_tokenizer

        if has_tokenizer(source := find_model(path)):
            read_tokenizer(source)  # reports an id outside the embedding before the preparation
        data.prepare_data()
        check_tokenizer(data.folder, source)
    print(f"weights of {path}:\n{copy_weights(network, _read(path, trust or ''))}", flush=True)
    _read.cache_clear()
