"""Resolved configurations of the runs of a comparison, and digests of the files and classes in them."""

import hashlib
import json
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from kerple.base.errors import UserError
from kerple.compare import committed_records
from kerple.compare.planned_run import PlannedRun
from kerple.config.flat_configuration import flat
from kerple.config.parsing import parse
from kerple.config.user_code_digests import source_digests

POSITION = "--model.position"


def resolve(job: PlannedRun) -> PlannedRun:
    """Return the run with the resolved configurations of its fit and test. A pretrained model has no fit.

    Raises:
        UserError: If an argument of the run is wrong.
    """
    try:
        if not job.fit_flags:
            pretrained = import_module("kerple.cli.measure_pretrained")  # needs optional packages
            return replace(job, test_config=_of_run(pretrained.configuration(job.test_flags)))
        config, test_config, position = _shared(tuple(job.fit_flags), tuple(job.test_flags))
        strategy = {"position": _position(position, *job.position_flags)}
        if test_config["model"]["position"] == config["model"]["position"]:  # unless the test replaces the strategy
            test_config = test_config | {"model": test_config["model"] | strategy}
        return replace(job, config=config | {"model": config["model"] | strategy}, test_config=test_config)
    except (ArgumentError, UserError) as error:
        raise UserError(f"compare: {job.name}: {error}") from error


@cache
def _shared(fit: tuple[str, ...], test: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return the configurations of fit and test with these flags, and the strategy that the flags set, as one flag.

    The flags do not include `PlannedRun.position_flags`, so runs that differ only in strategy share one cached result.
    """
    from kerple.training.fit_options import fit_parser
    from kerple.training.stored_options import insert_stored_config

    parser = fit_parser()
    _, *arguments = insert_stored_config(["fit", f"{POSITION}=NoPE", *fit])  # NoPE if no file sets a strategy
    config = _of_run(parser.dump(parse(parser, arguments), skip_none=False))
    position = parser.parse_args(arguments, defaults=False).model.position
    try:
        test_options = parse(parser, ["--config", yaml.safe_dump(config), *test]) if test else None
    except UserError as error:
        raise UserError(f"test: {error}") from error
    test_config = _of_run(parser.dump(test_options, skip_none=False)) if test_options else config
    return config, test_config, f"{POSITION}={json.dumps(position.as_dict())}"


@cache
def _position(*flags: str) -> dict[str, Any]:
    """Return the resolved strategy of these flags. To resolve a whole configuration takes ten times as long."""
    from kerple.positions import StrategyBuilder

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument(POSITION, type=StrategyBuilder)
    resolved: dict[str, Any] = yaml.safe_load(parser.dump(parse(parser, [*flags]), skip_none=False))
    return resolved["model"]["position"]


def _of_run(text: str) -> dict[str, Any]:
    """Read a configuration from YAML, and leave out the options for folders and files of a run."""
    from kerple.config.checkpoint_agreement import LOCATION

    return {key: value for key, value in yaml.safe_load(text).items() if key == "trust" or key not in LOCATION}


def with_inputs(job: PlannedRun) -> PlannedRun:
    """Return the run with digests of the models and of the user's own classes that its configuration names."""
    models = {str(job.training[key]) for key in ("weights", "model.path") if job.training.get(key)}
    of_test = {f"{committed_records.OF_TEST}{name}": digest for name, digest in source_digests(flat(job.test)).items()}
    return replace(job, inputs={path: _digest(path) for path in models} | source_digests(job.training) | of_test)


@cache
def _digest(path: str) -> str:
    """Return the sha256 of a checkpoint, or of a model that `kerple.hf.pretrained_files.find_model` finds."""
    if is_zipfile(path):  # a checkpoint of `fit`
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    from kerple.hf.pretrained_files import find_model, source_digest  # needs optional packages

    return source_digest(find_model(path))


def with_precision(job: PlannedRun) -> PlannedRun:
    """Return the run with the precision that ``auto`` selects on this machine in place of ``auto``."""
    from kerple.base.auto_precision import choose_precision

    trainer = job.config.get("trainer", {})
    if trainer.get("precision") != "auto":
        return job
    precision = choose_precision(trainer["accelerator"])[0]
    return replace(job, config=job.config | {"trainer": trainer | {"precision": precision}})


def prepare_and_checksum(data: dict[str, Any] | None) -> str | None:
    """Prepare the data of a configuration, before several runs read it.

    Args:
        data: The section ``data`` of a configuration: ``class_path`` and ``init_args``.

    Returns:
        The checksum of the data, or None if the data module has no checksum, as for a task.

    Raises:
        UserError: If the data module cannot be built, or its data cannot be prepared.
    """
    from pytorch_lightning import LightningDataModule

    from kerple.training.fit_options import original_errors

    parser = ArgumentParser()
    parser.add_subclass_arguments(LightningDataModule, "data")
    with original_errors(parser):
        module = parser.instantiate_classes(parser.parse_object({"data": data})).data
    module.prepare_data()
    module.setup("fit")
    return module.checksum() if hasattr(module, "checksum") else None
