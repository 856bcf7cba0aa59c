"""`python run.py prepare --config …`: prepares the shards of a configuration, and nothing else."""

import argparse
from pathlib import Path

import yaml
from jsonargparse import ArgumentParser
from pytorch_lightning import LightningDataModule

from kerple.base.errors import UserError
from kerple.cli import ranges
from kerple.cli.inspect import show
from kerple.cli.reading import read
from kerple.data.datamodule import TokenShards
from kerple.tasks import TaskData


def main(arguments: list[str]) -> None:
    """Prepare the shards that are missing, and print a summary.

    Args:
        arguments: Arguments of the command. Of a configuration, only the section `data` is used.

    Raises:
        UserError: A configuration cannot be read or has no section `data`.
    """
    parser = ArgumentParser(prog="run.py prepare", description=__doc__, exit_on_error=False)
    parser.add_argument("--config", action="config", help="a config with a `data` section; what follows it wins")
    parser.add_subclass_arguments(
        LightningDataModule, "data", default={"class_path": "kerple.data.datamodule.TokenShards"}
    )
    files = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    files.add_argument("--config", "-c", action="append", default=[])
    given, rest = files.parse_known_args(arguments)
    sections = [argument for path in given.config for argument in ("--config", _data_section(path))]
    config = read(parser, [*sections, *rest])
    ranges.check(config, "prepare")
    prepare(parser.instantiate_classes(config).data)


def prepare(data: LightningDataModule) -> None:
    """Prepare the shards of a data module and print a summary of them.

    Raises:
        UserError: It has no shards.
    """
    if not isinstance(data, TokenShards):
        what = "a task" if isinstance(data, TaskData) else "data of one's own"
        raise UserError(
            f"data: got {type(data).__name__}, {what}, which has no shards to prepare; expected TokenShards"
        )
    data.prepare_data()
    data.setup()
    show(data.manifest)


def _data_section(path: str) -> str:
    try:
        config = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise UserError(f"config: got {path}, which cannot be read ({error})") from error
    if not isinstance(config, dict) or not isinstance(config.get("data"), dict):
        raise UserError(f"config: got {path}, expected a file with a section `data`, such as those in configs/data")
    return yaml.safe_dump({"data": config["data"]})
