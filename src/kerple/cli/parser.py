"""The options of a run, as functions that add them to a parser; `fit`, `predict`, `plan` and `compare` use them."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from jsonargparse import ArgumentParser
from pytorch_lightning import LightningDataModule
from pytorch_lightning.cli import LightningArgumentParser
from pytorch_lightning.utilities.exceptions import MisconfigurationException

import kerple.callbacks
import kerple.data.datamodule  # noqa: F401
from kerple.base.errors import UserError
from kerple.training.language_model import LanguageModel
from kerple.training.trainer import AutoTrainer

SEED = 1235


def fit_parser() -> LightningArgumentParser:
    """A parser of `fit`'s options, which resolves the configuration of a run without building anything.

    It has all sections of `LightningCLI`'s parser, but not ``ckpt_path``, which is no part of a configuration.
    """
    parser = LightningArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_argument("-c", "--config", action="config")
    parser.add_argument("--seed_everything", type=bool | int, default=SEED)
    parser.add_lightning_class_args(AutoTrainer, "trainer")
    add_model_and_data(parser)
    add_run_arguments(parser)
    return parser


def add_model_and_data(parser: LightningArgumentParser) -> None:
    """Add the options ``model`` and ``data``; the model takes vocabulary and length from the data."""
    parser.add_lightning_class_args(LanguageModel, "model")
    parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True)
    link_model_to_data(parser)


def link_model_to_data(parser: LightningArgumentParser) -> None:
    """Link the model's vocabulary and training length to those of the data."""
    parser.link_arguments("data.init_args.vocabulary", "model.vocabulary")
    parser.link_arguments("data.init_args.length", "model.length")


def add_run_arguments(parser: LightningArgumentParser) -> None:
    """Add the options of a run other than model, data and trainer, such as its folder."""
    add_folder_arguments(
        parser, "run", "Folder of this run; null: <logs>/<experiment>/<strategy>/seed-<seed>, or a new version of it."
    )
    parser.add_argument(
        "--trust",
        default="",
        help="Packages whose classes a checkpoint may name beside this project's, and URLs that it may read: a,b,c.",
    )
    parser.add_argument(
        "--weights",
        type=str | None,
        default=None,
        help="For fit: start from a model that exists: a checkpoint, a Hugging Face folder or name, a GGUF file.",
    )


def add_folder_arguments(parser: LightningArgumentParser, experiment: str, run_dir: str) -> None:
    """Add the options of where a run's files go, with a default for ``experiment`` and a help text for ``run_dir``."""
    parser.add_argument("--experiment", default=experiment, help="First folder below --logs: what belongs together.")
    parser.add_argument("--logs", default="logs", help="Root of all runs.")
    parser.add_argument("--run_dir", type=str | None, default=None, help=run_dir)


def peek(arguments: list[str], *names: str) -> tuple[argparse.Namespace, list[str]]:
    """The values of the named options before all arguments are parsed, None where one is missing, and the rest."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in names:
        parser.add_argument(f"--{name}")
    return parser.parse_known_args(arguments)


def mistake(error: Exception) -> UserError:
    """A `UserError` unchanged; the error of Lightning, or of a logger's package that is missing, about the Trainer."""
    return error if isinstance(error, UserError) else UserError(f"trainer: {error}")


@contextmanager
def unwrapped(parser: ArgumentParser) -> Iterator[None]:
    """Context in which a class that the parser builds raises its own error about an option.

    Where an option has several types, the parser would raise another error, with the text of all types' errors.
    """
    mistakes: list[Exception] = []

    def build(kind, /, *args, **options):  # an option of the class may be called kind
        try:
            return kind(*args, **options)
        except (UserError, MisconfigurationException, ModuleNotFoundError) as error:
            mistakes.append(error)
            raise

    for kind in (LightningDataModule, object):  # in place of Lightning's for data; its own for the model stays
        parser.add_instantiator(cast("Any", build), kind)
    try:
        yield
    except Exception as error:
        raise mistake(mistakes[-1]) if mistakes else error from error
