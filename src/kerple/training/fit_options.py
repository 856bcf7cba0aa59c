"""Functions that add the options of a run to a parser, for `fit`, `predict`, `plan` and `compare`."""

from typing import Any

import torch
import yaml
from jsonargparse import ArgumentParser
from jsonargparse.typing import register_type
from pytorch_lightning import LightningDataModule
from pytorch_lightning.cli import LightningArgumentParser

from kerple.base.errors import require
from kerple.config.checkpoint_agreement import accumulation_schedule
from kerple.config.options import add_folder_arguments, add_trust_argument
from kerple.data.loader import batches_of_epoch
from kerple.training.allowed_classes import import_classes
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


def build_model(options: dict[str, Any]) -> LanguageModel:
    """Build a model with these options on torch's default device."""
    parser = ArgumentParser()
    parser.add_class_arguments(LanguageModel, "model")
    return parser.instantiate_classes(parser.parse_object({"model": options})).model


def accumulated_batches(trainer: Any) -> int:
    """Return the number of batches in a step of the first epoch, as `kerple.data.loader.batches_of_run` counts them.

    Args:
        trainer: Resolved options of the Trainer, a mapping or a `Namespace`.
    """
    schedule = accumulation_schedule(trainer)
    return trainer["accumulate_grad_batches"] if schedule is None else schedule.get(0, 1)


def steps_and_batches(trainer: Any, epoch_batches: int | None) -> tuple[int, int]:
    """Return the number of steps of a fit, and the number of batches that a device reads in them.

    Args:
        trainer: Resolved options of the Trainer, a mapping or a `Namespace`.
        epoch_batches: Number of batches of the data, after which an epoch ends; None if the data has no end.
    """
    schedule, accumulated = accumulation_schedule(trainer) or {}, accumulated_batches(trainer)
    left, batches, epoch = trainer["max_steps"], 0, 0
    limit, epochs = trainer.get("limit_train_batches"), trainer.get("max_epochs") or -1
    if epoch_batches is None and limit is None:
        return left, left * accumulated
    # a loader of data without an end has the batches of all steps with the factor of the first epoch
    epoch_batches = max(1, batches_of_epoch(limit, epoch_batches or left * accumulated))
    while left > 0 and epoch != epochs:
        accumulated = schedule.get(epoch, accumulated)
        batches += min(epoch_batches, left * accumulated)
        left, epoch = max(0, left - -(-epoch_batches // accumulated)), epoch + 1  # the last step may have fewer batches
    return trainer["max_steps"] - left, batches


def check_data_arguments(data: Any) -> None:
    """Raise a UserError if a data module has no arguments from which the model gets its sizes.

    Args:
        data: Class path and arguments of the data module, a `Namespace`.
    """
    given = data.get("init_args") or {}
    missing = [name for name in ("vocabulary", "length") if name not in given]
    expected = "the arguments vocabulary and length, from which the model gets its sizes"
    require(not missing, "data", f"{data.class_path}, whose __init__ has no {' and no '.join(missing)}", expected)


def link_model_to_data(parser: LightningArgumentParser) -> None:
    """Let the parser set the vocabulary and training length of the model to those of the data."""
    parser.link_arguments("data.init_args.vocabulary", "model.vocabulary")
    parser.link_arguments("data.init_args.length", "model.length")


def add_run_arguments(parser: LightningArgumentParser) -> None:
    """Add the options of a run except model, data and trainer: those of its folder, ``trust`` and ``weights``."""
    import_classes()
    add_folder_arguments(parser, "run", "<strategy>/seed-<seed>")
    add_trust_argument(parser)
    weights = "For fit: start from the weights of a run's folder, a checkpoint, a Hugging Face model, or a GGUF file."
    parser.add_argument("--weights", type=str | None, help=weights)
