"""Differences between runs, other than strategy and seed, that make a comparison invalid."""

from typing import Any

import pandas as pd

from kerple.compare.configuration import LOCATIONS
from kerple.compare.runs import Run, Runs
from kerple.compare.statistics import CELL

POSITIONAL = ("model.position", "model.scaling", "model.factor")  # scaling and factor are of pretrained models
PRIVATE = ("seed_everything", "run_dir", "config", "ckpt_path")  # options with another value in each run


def inconsistencies(runs: Runs) -> list[str]:
    """Describe differences between runs that make a comparison invalid, each in one text with the differing values.

    These are differences in

    - options, other than the seed, of runs of the same strategy and the same part of the comparison, such as a task,
    - the description of a protocol's scored text (`kerple.compare.runs.Runs.text_descriptions`),
    - the precision of training,
    - the number of targets of a protocol and length.
    """
    found = []
    members: dict[str, list[tuple[Run, dict[str, Any]]]] = {}
    for run, config in public_configs(runs).items():
        members.setdefault(run.label, []).append((run, config))
    for label, of_label in members.items():
        for key in dict.fromkeys(key for _, config in of_label for key in config):
            values = {str(config.get(key)) for _, config in of_label}
            if len(values) > 1 and not all(config.get(key) == run.seed for run, config in of_label):
                found.append(f"{label}: {key}: {' | '.join(sorted(values))}")
    found += [f"{protocol}: {' | '.join(text)}" for protocol, text in runs.text_descriptions.items() if len(text) > 1]
    return found + _precisions(runs) + _numbers_of_targets(runs.results)


def _precisions(runs: Runs) -> list[str]:
    """One text with all precisions of training, or an empty list if all runs have the same."""
    members: dict[str, list[str]] = {}
    for run, environment in runs.environments.items():
        if "precision" in environment:
            members.setdefault(environment["precision"], []).append(f"{run.label} seed {run.seed}")
    return [f"precision: {_values(members)}"] if len(members) > 1 else []


def _numbers_of_targets(results: pd.DataFrame) -> list[str]:
    """A text for each protocol with a length at which its runs scored different numbers of targets.

    It gives the first of these lengths.
    """
    found: dict[str, str] = {}
    for (_, protocol, length), group in results.groupby(CELL, sort=False):
        if group["count"].nunique() > 1:
            names = group["strategy"] + " seed " + group["seed"].astype(str)
            members = {f"{count:,.0f}": list(of_count) for count, of_count in names.groupby(group["count"])}
            found.setdefault(str(protocol), f"{protocol} at {length}: scored per run: {_values(members)}")
    return list(found.values())


def _values(members: dict[str, list[str]]) -> str:
    """Join several values, the most frequent first. The others are followed by the names of their runs.

    Args:
        members: The names of the runs with each value.
    """
    usual, *others = sorted(members, key=lambda value: -len(members[value]))
    return " | ".join([usual, *(f"{value} ({', '.join(members[value])})" for value in others)])


def only_positions_differ(runs: Runs) -> bool:
    """Whether the configurations of runs with the same part and seed differ only in the options of the strategy."""
    firsts: dict[tuple[str, int], dict[str, Any]] = {}
    for run, config in public_configs(runs).items():
        first = firsts.setdefault((run.part, run.seed), config)
        if any(first.get(key) != config.get(key) for key in first | config if not key.startswith(POSITIONAL)):
            return False
    return True


def public_configs(runs: Runs) -> dict[Run, dict[str, Any]]:
    """The configurations of the runs, without values of None and options that do not affect results."""
    return {
        run: {
            key: value
            for key, value in config.items()
            if value is not None and key not in PRIVATE and not LOCATIONS.fullmatch(key)
        }
        for run, config in runs.configs.items()
    }
