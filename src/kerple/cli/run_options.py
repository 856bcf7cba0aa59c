"""Functions that add the options of a run to a parser, for `fit`, `predict`, `plan` and `compare`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import yaml
from jsonargparse import ArgumentParser
from jsonargparse.typing import register_type
from pytorch_lightning import LightningDataModule
from pytorch_lightning.cli import LightningArgumentParser
from pytorch_lightning.utilities.exceptions import MisconfigurationException

import kerple.cli.allowed_classes  # noqa: F401 -- imports all classes that an option may name
from kerple.base.errors import UserError
from kerple.cli.option_parsing import add_folder_arguments
from kerple.training.language_model import LanguageModel
from kerple.training.trainer import AutoTrainer

# Defaults in Lightning's callbacks that a configuration could not contain: a device, and members of enumerations that
# are also strings
register_type(torch.device)
yaml.SafeDumper.add_multi_representer(str, lambda dumper, value: dumper.represent_str(str.__str__(value)))

SEED = 1235


def fit_parser() -> LightningArgumentParser:
    """Return a parser with the options of `fit`, which resolves a configuration without building its objects.

    It has the options of `LightningCLI`'s parser except ``ckpt_path`` and ``weights_only``, which are arguments of
    `Trainer.fit`.
    """
    parser = LightningArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_argument("-c", "--config", action="config")
    parser.add_argument("--seed_everything", type=bool | int, default=SEED)
    parser.add_lightning_class_args(AutoTrainer, "trainer")
    add_model_and_data(parser)
    add_run_arguments(parser)
    return parser


def add_model_and_data(parser: LightningArgumentParser) -> None:
    """Add the options ``model`` and ``data``, and link the model's vocabulary and length to those of the data."""
    parser.add_lightning_class_args(LanguageModel, "model")
    parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True)
    link_model_to_data(parser)


def link_model_to_data(parser: LightningArgumentParser) -> None:
    """Let the parser set the vocabulary and training length of the model to those of the data."""
    parser.link_arguments("data.init_args.vocabulary", "model.vocabulary")
    parser.link_arguments("data.init_args.length", "model.length")


def add_run_arguments(parser: LightningArgumentParser) -> None:
    """Add the options of a run except model, data and trainer: those of its folder, ``trust`` and ``weights``."""
    add_folder_arguments(parser, "run", "<strategy>/seed-<seed>")
    trust = "Trusted packages and URLs: a,b,c. A checkpoint may use classes of the packages, and files below the URLs."
    parser.add_argument("--trust", default="", help=trust)
    weights = "For fit: start from the weights of a checkpoint, a Hugging Face folder or name, or a GGUF file."
    parser.add_argument("--weights", type=str | None, help=weights)


def as_user_error(error: Exception) -> Exception:
    """Return an error as a UserError about the Trainer with its message. UserErrors and missing imports stay."""
    missing = isinstance(error, ModuleNotFoundError) and error.name  # Lightning's errors about packages have no name
    return error if isinstance(error, UserError) or missing else UserError(f"trainer: {error}")


@contextmanager
def original_errors(parser: ArgumentParser) -> Iterator[None]:
    """Context in which an error of a class that the parser builds is raised as a UserError with only its own message.

    Outside this context, the parser raises an error with one message for each type that the option accepts.
    """
    mistakes: list[Exception] = []

    def build(kind, /, *args, **options):  # positional-only, because a class may have an option named kind
        try:
            return kind(*args, **options)
        except (UserError, MisconfigurationException, ModuleNotFoundError) as error:
            mistakes.append(error)
            raise

    # The parser uses the first instantiator that fits a class. If `LightningCLI` has added instantiators, that of the
    # model stays first, and `build` replaces that of the data. For `object`, `build` fits all remaining classes.
    for kind in (LightningDataModule, object):
        parser.add_instantiator(cast("Any", build), kind)
    try:
        yield
    except Exception as error:
        if not mistakes:
            raise
        raise as_user_error(mistakes[-1]) from error
