"""`python run.py fit`, `validate` and `test`."""

import warnings

import yaml

from kerple.base.errors import UserError
from kerple.base.precision import SAFE, emulated
from kerple.cli.arguments import peek
from kerple.cli.classes import classes
from kerple.cli.lightning import CLI
from kerple.cli.torch_settings import configure_torch
from kerple.positions import names
from kerple.training.language_model import LanguageModel
from kerple.training.trainer import print_once


def run(arguments: list[str], description: str) -> None:
    """Run `fit`, `validate` or `test`.

    Args:
        arguments: The command and its arguments.
        description: Description of the program, for its help.

    Raises:
        UserError: If the model, its data or its trainer cannot be built from the options.
    """
    configure_torch()
    command = arguments[0]
    if command != "fit":  # this warning is redundant, because the commands print their checkpoint
        warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`")
    kinds = {"--data.help": ("TokenShards", "TaskData"), "--model.position.help": names()}
    if arguments[-1] in kinds:  # the parser would show the options of the base class, which has none
        raise UserError(f"{arguments[-1]}: got no class, expected one of {', '.join(kinds[arguments[-1]])}")
    CLI(LanguageModel, checkpoint_first(arguments), description)


def checkpoint_first(arguments: list[str]) -> list[str]:
    """Insert the configuration of a checkpoint before the arguments, which replace it.

    For `test` and `validate` it is that of ``--ckpt_path``; for `fit` it is the architecture of ``--weights``.

    Raises:
        UserError: If the checkpoint does not exist or cannot be read, or ``--weights`` is an option of a test.
    """
    command, *rest = arguments
    options, _ = peek(rest, "ckpt_path", "weights", "trust")
    if command == "fit" and options.weights is not None:
        from kerple.cli.weights import architecture_first  # needs optional packages

        return [command, *architecture_first(rest, options.weights, options.trust)]
    if command == "fit" or {"-h", "--help"} & set(rest):
        return arguments
    if options.weights is not None:
        raise UserError(f"weights: got {options.weights}, expected --ckpt_path instead; --weights is for `fit` only")
    if options.ckpt_path is None:
        raise UserError(f"ckpt_path: got none, expected a checkpoint to {command}; add --ckpt_path FILE")
    # has no devices and no parallel strategy, which depend on the machine
    config = classes(options.trust or "").config(options.ckpt_path)
    if emulated(precision := config["trainer"].get("precision")):
        config["trainer"]["precision"] = SAFE
        print_once(f"precision {SAFE}, because this machine emulates {precision}, in which the run was trained")
    return [command, "--config", yaml.safe_dump(config), *rest]
