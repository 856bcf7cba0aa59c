"""The configuration a run would have, default values included: what a run that exists is held against."""

import contextlib
import io
from typing import Any

import yaml
from jsonargparse import ArgumentParser
from pytorch_lightning import LightningDataModule

from kerple.compare.comparison import Job
from kerple.errors import UserError

PLACES = ("run_dir", "ckpt_path", "config", "logs", "experiment", "trust", "auto_precision")  # where, not what


def resolve(job: Job) -> dict[str, Any]:
    """Resolved configuration of a run's fit, of a pretrained model's test, nested.

    Raises:
        UserError: If the command line does not parse; with the parser's own message.
    """
    from kerple.cli import main as cli  # it imports this package when `compare` is called

    printed, complaint = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(complaint):
            cli.main([*(["test", *job.test] if job.pretrained else ["fit", *job.fit]), "--print_config"])
    except SystemExit as end:
        if end.code:
            message = complaint.getvalue()
            raise UserError(f"compare: {job.name}: {message[message.rfind('error:') :].strip()}") from None
    return {key: value for key, value in yaml.safe_load(printed.getvalue()).items() if key not in PLACES}


def prepare(data: dict[str, Any]) -> None:
    """Build what the data of a configuration lacks, once, before runs that share it start side by side."""
    parser = ArgumentParser()
    parser.add_subclass_arguments(LightningDataModule, "data")
    parser.instantiate_classes(parser.parse_object({"data": data})).data.prepare_data()
