"""Runs of a comparison: their configurations, the preparation of their data, and the reuse of records.

A record is a copy of a finished run's results that is committed with a report.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser
from rich.console import Console

from kerple.base.errors import UserError
from kerple.compare import committed_records, run_process
from kerple.compare.comparison_file import Comparison
from kerple.compare.plan_deviations import digests
from kerple.compare.planned_run import PlannedRun
from kerple.config.flat_configuration import FOLDER_OPTIONS, differences
from kerple.config.parsing import parse

POSITION = "--model.position"


def plan_runs(comparison: Comparison, parallel: int, report_only: bool) -> list[PlannedRun]:
    """Return the runs of a comparison with their configurations and inputs. Nothing is written except prepared data.

    Args:
        comparison: The comparison.
        parallel: Number of runs at a time.
        report_only: Whether nothing is trained. Data is then not prepared.

    Raises:
        UserError: If an option is wrong.
    """
    with Console(stderr=True).status(f"reading the options of {comparison.name}'s runs"):
        plan = digests(comparison)
        runs = [resolve(run) for run in comparison.planned_runs()]
        runs = [replace(run, inputs=committed_records.current_inputs(run)) for run in runs]
    if report_only:
        checksums = _recorded_checksums(runs, comparison.records)
    else:
        options = {str(run.data_options): run.data_options for run in runs}
        checksums = {key: read_checksum(of_runs) for key, of_runs in options.items()}
        runs = [replace(run, data=checksums[str(run.data_options)]) for run in runs]
        checksums |= _prepared_checksums(runs)
    runs = [replace(run, data=checksums.get(str(run.data_options)), plan=plan, parallel=parallel) for run in runs]
    # the weights of a parent that is still to be trained are not known
    finished = {run.name for run in runs if committed_records.finished(run)}
    for run in runs:
        if run.parent not in finished:
            run.inputs.pop(committed_records.PARENT, None)
    return runs


def resolve(run: PlannedRun) -> PlannedRun:
    """Return the run with the resolved configurations of its fit and test. A pretrained model has no fit.

    Raises:
        UserError: If an argument of the run is wrong.
    """
    try:
        if not run.fit_flags:
            from kerple.measure.pretrained_options import configuration  # imports torch, which takes seconds

            return replace(run, test_config=_of_run(configuration(run.test_flags)))
        config, test_config, position = _shared(tuple(run.fit_flags), tuple(run.test_flags))
        strategy = {"position": _position(position, *run.position_flags)}
        if _strategy(test_config) == _strategy(config):  # unless the test replaces the strategy
            test_config = test_config | {"model": test_config["model"] | strategy}
        return replace(run, config=config | {"model": config["model"] | strategy}, test_config=test_config)
    except (ArgumentError, UserError) as error:
        raise UserError(f"compare: {run.name}: {error}") from error


def _strategy(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the class of the strategy in a configuration, and its options, which may be missing if there are none."""
    position = config["model"]["position"]
    return position["class_path"], position.get("init_args", {})


@cache
def _shared(fit: tuple[str, ...], test: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return the configurations of fit and test with these flags, and the strategy that the flags set, as one flag.

    The flags do not include `PlannedRun.position_flags`, so runs that differ only in strategy share one cached result.
    """
    from kerple.training.fit_options import fit_parser  # imports Lightning, which takes seconds
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
    from kerple.positions import StrategyBuilder  # imports torch, which takes seconds

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument(POSITION, type=StrategyBuilder)
    resolved: dict[str, Any] = yaml.safe_load(parser.dump(parse(parser, [*flags]), skip_none=False))
    return resolved["model"]["position"]


def _of_run(text: str) -> dict[str, Any]:
    """Read a configuration from YAML, and leave out the options for folders and files of a run."""
    return {key: value for key, value in yaml.safe_load(text).items() if key == "trust" or key not in FOLDER_OPTIONS}


def _recorded_checksums(runs: list[PlannedRun], folders: Mapping[Path, Path]) -> dict[str, str | None]:
    """Return the checksum of the data in finished runs and records, by the options of the data. Data is not read.

    Of finished runs and records with the configuration and the corpus of a run, the first determines the checksum. If
    the corpus is null, only the folder of the shards determines it, and is read if it is on this machine.
    """
    checksums: dict[str, str | None] = {}
    for run in runs:
        options, key = run.data_options or {}, str(run.data_options)
        if key not in checksums:
            named = options.get("init_args", {}).get("corpus") is not None
            checksums[key] = None if named else read_checksum(run.data_options)
        entries = map(committed_records.read_run_entry, [run.test_folder, *map(run.record, folders)])
        equal = (entry.get("data") for entry in entries if entry and not _changed_options(entry["config"], run))
        checksums[key] = checksums[key] or next(equal, None)
    return checksums


def _changed_options(config: dict[str, Any], run: PlannedRun) -> list[str]:
    """Describe the differences between the configuration of a finished run and that of a run, with the corpus."""
    return differences(config, run.training) + committed_records.changed_corpus(config, run.training)


def _prepared_checksums(runs: list[PlannedRun]) -> dict[str, str | None]:
    """Prepare the data of the runs that may be trained, before several runs read it.

    Return its checksum by the options of the data. It is None for a data module without a checksum, as for a task.
    """
    changed = find_changed_runs(runs, report_only=False, rerun_changed=True)
    trained = [run for run in runs if run in changed or not committed_records.finished(run)]
    trained += parents_without_weights(trained, runs, changed)
    options = {str(run.data_options): run.data_options for run in trained}
    return {key: prepare_and_checksum(of_runs) for key, of_runs in options.items()}


def read_checksum(data: dict[str, Any] | None) -> str | None:
    """Return the checksum of shards from their manifest, without preparing them.

    Args:
        data: The section ``data`` of a configuration: ``class_path`` and ``init_args``.

    Returns:
        The checksum, or None if the shards are not prepared, or the data module is another one than `TokenShards`.
    """
    if data is None or not data.get("class_path", "").endswith(".TokenShards"):
        return None
    from kerple.data import TokenShards  # imports torch, which takes seconds

    try:
        module = TokenShards(**data.get("init_args", {}))
        module.setup("fit")
    except UserError:  # the preparation reports it, if a run needs the shards
        return None
    return module.checksum()


def prepare_and_checksum(data: dict[str, Any] | None) -> str | None:
    """Prepare the data of a configuration, before several runs read it.

    Args:
        data: The section ``data`` of a configuration: ``class_path`` and ``init_args``.

    Returns:
        The checksum of the data, or None if the data module has no checksum, as for a task.

    Raises:
        UserError: If the data module cannot be built, or its data cannot be prepared.
    """
    from pytorch_lightning import LightningDataModule  # takes seconds

    from kerple.config.class_errors import original_errors

    parser = ArgumentParser()
    parser.add_subclass_arguments(LightningDataModule, "data")
    with original_errors(parser):
        module = parser.instantiate_classes(parser.parse_object({"data": data})).data
    module.prepare_data()
    module.setup("fit")
    return module.checksum() if hasattr(module, "checksum") else None


def find_changed_runs(runs: list[PlannedRun], report_only: bool, rerun_changed: bool) -> dict[PlannedRun, str]:
    """Return the differences of existing runs whose configuration has changed.

    Args:
        runs: All runs.
        report_only: Whether to print a warning, because these runs are left out of the report.
        rerun_changed: Whether to accept these runs, because the caller deletes them.

    Raises:
        UserError: If there are such runs, and neither ``report_only`` nor ``rerun_changed``.
    """
    changed: dict[PlannedRun, str] = {}
    for run in runs:  # parents are before their stages
        changes = committed_records.changes(run)
        if run.parent in {other.name for other in changed} and run.directory.exists():
            changes.append(f"{run.parent} has changed, from which it starts")
        if changes:
            changed[run] = "; ".join(changes)
    text = "\n".join(f"  {run.name}: {changes}" for run, changes in changed.items())
    if changed and report_only:
        print(f"warning: these runs have another configuration and are not in the report:\n{text}")
    elif changed and not rerun_changed:
        advice = "add --rerun_changed true to train them again, or choose another folder with --runs"
        raise UserError(f"compare: runs: existing runs have another configuration; {advice}\n{text}")
    return changed


def parents_without_weights(
    missing: Iterable[PlannedRun], runs: Iterable[PlannedRun], changed: Collection[PlannedRun]
) -> list[PlannedRun]:
    """Return finished runs from which missing runs start, and of which only a record is here. They are trained again.

    Args:
        missing: The missing runs.
        runs: All runs.
        changed: Runs that start again, because their configuration has changed.
    """
    by_name, found = {run.name: run for run in runs}, dict[PlannedRun, None]()
    for child in missing:
        parent = by_name.get(child.parent or "")
        while parent and (child in changed or not child.checkpoint.is_file()) and not parent.checkpoint.is_file():
            if parent not in changed and committed_records.finished(parent):
                found[parent] = None
            child, parent = parent, by_name.get(parent.parent or "")
    return list(found)


def reuse_records(
    runs: Iterable[PlannedRun], comparison: Comparison, report_only: bool, parents: Iterable[PlannedRun] = ()
) -> dict[str, str]:
    """Copy the records of runs that are not started, write missing records, and print which were reused or refused.

    Args:
        runs: The runs.
        comparison: The comparison.
        report_only: Whether a run with the precision ``auto`` accepts records of any precision. If runs are trained,
            ``auto`` is the precision of this machine, and the precision of a record must be the same.
        parents: Other runs that may be parents. The record of a stage is reused only if its parent is finished.

    Returns:
        The reason why the last record of a run was refused, by the name of the run.
    """
    folders, refused = comparison.records, dict[str, str]()
    runs = list(runs)
    by_name = {run.name: run for run in (*runs, *parents)}
    runs_by_outcome: dict[str, list[str]] = {}
    for run in runs:
        found = [(report, run.record(folder)) for folder, report in folders.items()] if _has_nothing(run) else []
        records = [(report, record) for report, record in found if record.is_dir()]
        # the lock of a run without records would wait until another command has trained it
        with run_process.locked(run) if records else nullcontext():
            for report, record in records if records and _has_nothing(run) else ():  # again, with the lock
                parent = by_name.get(run.parent or "")
                if run.parent and not (parent and committed_records.finished(parent)):
                    objection: str | None = f"{run.parent}, from which it starts, is not finished"
                else:
                    objection = committed_records.reuse(run if report_only else with_precision(run), record)
                outcome = f"not reused from {report}: {objection}" if objection else f"reused from {report}"
                runs_by_outcome.setdefault(outcome, []).append(run.name)
                if objection is None:
                    break
                refused[run.name] = objection
        if committed_records.finished(run):
            committed_records.write_record(run, comparison.report_folder, folders)
    for outcome, (first, *others) in runs_by_outcome.items():
        number = f" and {len(others)} other run{'s' * (len(others) > 1)}" if others else ""
        print(f"{first}{number}: {outcome}")
    return refused


def _has_nothing(run: PlannedRun) -> bool:
    """Return whether a run is neither started nor finished, so that a record can be copied into its folder."""
    is_started = run.checkpoint.parent.exists() or committed_records.has_test_of_user(run.test_folder)
    return not (is_started or committed_records.finished(run))


def with_precision(run: PlannedRun) -> PlannedRun:
    """Return the run with the precision that ``auto`` selects on this machine in place of ``auto``."""
    from kerple.config.auto_precision import choose_precision  # imports torch, which takes seconds

    trainer = run.config.get("trainer", {})
    if trainer.get("precision") != "auto":
        return run
    precision = choose_precision(trainer["accelerator"])[0]
    return replace(run, config=run.config | {"trainer": trainer | {"precision": precision}})
