"""`python run.py fit`, `validate` and `test`."""

import warnings

from kerple.base.errors import UserError
from kerple.cli.lightning import CLI
from kerple.positions import names
from kerple.training.language_model import LanguageModel
from kerple.training.stored_options import insert_stored_config
from kerple.training.torch_settings import configure_torch


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
