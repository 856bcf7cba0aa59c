"""Differences between runs, other than strategy and seed, that make a comparison invalid."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pandas as pd

from kerple.compare.finished_runs import FinishedRun, Runs
from kerple.compare.statistics import CELL
from kerple.config.flat_configuration import FOLDER_OPTIONS, STORAGE_OPTIONS

POSITIONAL = ("model.position", "model.scaling", "model.factor")  # only pretrained models have scaling and factor


def inconsistencies(runs: Runs) -> list[str]:
    """Describe differences between runs that make a comparison invalid, each in one text with the differing values.

    These are differences in

    - options other than the seed, between runs of the same strategy in the same part of the comparison (a part is, for
      example, one task),
    - the description of a protocol's scored text (`kerple.compare.finished_runs.Runs.text_descriptions`),
    - the tokens of a protocol's test text, by their digest,
    - the precision and the number of devices of training,
    - the checksum of the data in the same part,
    - the number of targets of a protocol and length.
    """
    found = []
    configs: defaultdict[str, dict[FinishedRun, dict[str, Any]]] = defaultdict(dict)
    for run, config in public_configs(runs).items():
        configs[run.part_and_strategy][run] = config
    for label, of_label in configs.items():
        for key in dict.fromkeys(key for config in of_label.values() for key in config):
            values = {str(config.get(key)) for config in of_label.values()}
            if len(values) > 1 and not all(config.get(key) == run.seed for run, config in of_label.items()):
                found.append(f"{label}: {key}: {' | '.join(sorted(values))}")
    found += [f"{protocol}: {' | '.join(text)}" for protocol, text in runs.text_descriptions.items() if len(text) > 1]
    members: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for run, environment in runs.environments.items():
        data = f"{run.part} data".strip()
        for key, name in (("precision", "precision"), ("devices", "devices"), ("data", data)):
            if key in environment:
                members[name][environment[key]].append(f"{run.part_and_strategy} seed {run.seed}")
    found += [f"{name}: {_values(values)}" for name, values in members.items() if len(values) > 1]
    texts: dict[str, str] = {}  # the first protocol with each difference, because most protocols have the same text
    for protocol, of_protocol in runs.text_digests.items():
        runs_with = defaultdict[str, list[str]](list)
        for run, digest in of_protocol.items():
            runs_with[digest].append(f"{run.part_and_strategy} seed {run.seed}")
        if len(runs_with) > 1:
            texts.setdefault(_values(runs_with), protocol)
    found += [f"{protocol}: sha256 of the test text: {values}" for values, protocol in texts.items()]
    return found + _numbers_of_targets(runs.results)


def _numbers_of_targets(results: pd.DataFrame) -> list[str]:
    """Return a text for each protocol whose runs scored different numbers of targets at some length."""
    found: dict[str, str] = {}
    for (_, protocol, length), group in results.groupby(CELL, sort=False):
        if group["count"].nunique() > 1:
            names = group["strategy"] + " seed " + group["seed"].astype(str)
            members = {f"{count:,.0f}": list(of_count) for count, of_count in names.groupby(group["count"])}
            found.setdefault(str(protocol), f"{protocol} at {length}: number of scored targets: {_values(members)}")
    return list(found.values())


def _values(members: Mapping[str, list[str]]) -> str:
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


def public_configs(runs: Runs) -> dict[FinishedRun, dict[str, Any]]:
    """The configurations of the runs, without the seed, and without options that are None or do not affect results."""
    keys = {key for config in runs.configs.values() for key in config}
    of_one_run = ("seed_everything", *FOLDER_OPTIONS)
    hidden = {key for key in keys if key in of_one_run or STORAGE_OPTIONS.fullmatch(key)}
    return {
        run: {key: value for key, value in config.items() if value is not None and key not in hidden}
        for run, config in runs.configs.items()
    }
