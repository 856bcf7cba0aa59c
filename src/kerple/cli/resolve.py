"""The resolved configuration of a run, with all default values, for comparison with that of an existing run."""

from functools import cache
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser
from pytorch_lightning import LightningDataModule
from pytorch_lightning.cli import LightningArgumentParser

from kerple.base.errors import UserError
from kerple.base.shipped_configs import with_shipped_configs
from kerple.cli.fit import checkpoint_first
from kerple.cli.parser import fit_parser, mistake_in
from kerple.cli.reading import read
from kerple.compare.comparison import Job

PLACES = ("run_dir", "ckpt_path", "config", "logs", "experiment", "trust", "auto_precision")  # where a run is


def resolve(job: Job) -> dict[str, Any]:
    """The resolved configuration of a run's fit, or of a pretrained model's test, nested.

    Raises:
        UserError: If the run's arguments do not parse; the message is the parser's.
    """
    try:
        if job.pretrained:
            from kerple.cli.pretrained import configuration  # it needs packages that fits do not

            text = configuration(["test", *with_shipped_configs([*job.test])])
        else:
            _, *arguments = checkpoint_first(["fit", *job.fit])
            config = read(_parser(), arguments)
            text = _parser().dump(config, skip_none=False)
    except (ArgumentError, UserError) as error:
        raise UserError(f"compare: {job.name}: {error}") from error
    return {key: value for key, value in yaml.safe_load(text).items() if key not in PLACES}


def check_test(job: Job, config: dict[str, Any]) -> None:
    """Check the arguments of a run's test before anything is fitted.

    Args:
        job: A run that is fitted.
        config: Its resolved configuration, nested.

    Raises:
        UserError: If they do not parse.
    """
    try:
        read(_parser(), ["--config", yaml.safe_dump(config), *with_shipped_configs([*job.test])])
    except UserError as error:
        raise UserError(f"compare: test: {error}") from error


@cache
def _parser() -> LightningArgumentParser:
    return fit_parser()


def prepare(data: dict[str, Any] | None) -> LightningDataModule:
    """Prepare the data of a configuration before several runs start with it; return the data module, set up.

    Raises:
        UserError: If the data cannot be made as asked.
    """
    parser = ArgumentParser()
    parser.add_subclass_arguments(LightningDataModule, "data")
    try:
        made = parser.instantiate_classes(parser.parse_object({"data": data})).data
    except (ValueError, TypeError) as error:  # the parser's, of what the class said when it was made
        raise mistake_in(error) or error from error
    made.prepare_data()
    made.setup("fit")
    return made
