"""`python run.py fit`, `validate` and `test`."""

import warnings
from os.path import abspath, realpath
from pathlib import Path
from typing import Any

import yaml

from kerple.base.auto_precision import SAFE, emulated
from kerple.base.errors import UserError
from kerple.base.mapping_files import read_mapping
from kerple.base.run_folder_choice import LAST
from kerple.cli.allowed_classes import allowed_classes
from kerple.cli.lightning import CLI
from kerple.cli.option_parsing import split_options
from kerple.cli.torch_settings import configure_torch
from kerple.compare.flat_configuration import flat
from kerple.positions import names
from kerple.training.language_model import LanguageModel
from kerple.training.trainer import print_once


def run(arguments: list[str], description: str) -> None:
    """Run `fit`, `validate` or `test`.

    Args:
        arguments: The command and its arguments.
        description: Description of the program, for its help.

    Raises:
        UserError: If an option is wrong, so that the model, its data or the Trainer cannot be built.
    """
    configure_torch()
    if arguments[0] != "fit":  # a test needs no callbacks of the fit; Lightning warns that they are missing
        warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`")
    classes = {"--data.help": ("TokenShards", "TaskData"), "--model.position.help": names()}
    if (option := arguments[-1]) in classes:  # without a class, the parser would show no options
        raise UserError(f"{option}: got no class, expected one of {', '.join(classes[option])}")
    CLI(LanguageModel, insert_stored_config(arguments), description)


def insert_stored_config(arguments: list[str]) -> list[str]:
    """Insert options that a stored model determines. Arguments of the user take precedence over them.

    For `test` and `validate`, the inserted options are the configuration in the checkpoint ``--ckpt_path``. For `fit`,
    they are the architecture of the model ``--weights``, if this option is given. If a fit continues in a folder that
    was moved, the paths in the ``config.yaml`` of the folder are replaced.

    Args:
        arguments: The command and its arguments.

    Returns:
        The command and its arguments, with an additional ``--config`` if there is a stored model.

    Raises:
        UserError: If the checkpoint does not exist or cannot be read, or ``--weights`` is given for `test` or
            `validate`.
    """
    command, *rest = arguments
    options, _ = split_options(rest, "ckpt_path", "weights", "trust")
    if command == "fit" and options.weights is not None:
        from kerple.cli.initial_weights import insert_architecture  # needs optional packages

        return [command, *insert_architecture(rest, options.weights, options.trust)]
    if command == "fit":
        return [command, *_with_present_folder(rest, options.config, options.ckpt_path)]
    if {"-h", "--help"} & set(rest):
        return arguments
    if options.weights is not None:
        raise UserError(f"weights: got {options.weights}, expected --ckpt_path instead; --weights is for `fit` only")
    if options.ckpt_path is None:
        raise UserError(f"ckpt_path: got none, expected a checkpoint to {command}; add --ckpt_path FILE")
    # this configuration has no devices and no parallel strategy, because they depend on the machine
    config = allowed_classes(options.trust or "").config(options.ckpt_path)
    if emulated(precision := config["trainer"].get("precision")):
        config["trainer"]["precision"] = SAFE
        print_once(f"precision {SAFE}, because this machine emulates {precision}, in which the run was trained")
    return [command, "--config", yaml.safe_dump(config), *rest]


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
        if continues and Path(file).is_file() and (folder / LAST.parent).is_dir():
            config = read_mapping(Path(file))
            stored = flat(config).get("trainer.default_root_dir")
            if isinstance(stored, str) and realpath(stored) != realpath(folder):
                text = yaml.safe_dump(_moved(config, stored, str(folder)) | {"run_dir": str(folder)})
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
