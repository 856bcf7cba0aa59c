"""Differences between runs that a comparison of strategies must not have."""

from typing import Any

import pandas as pd

from kerple.compare.configuration import LOCATIONS
from kerple.compare.runs import Run, Runs
from kerple.compare.statistics import CELL

POSITIONAL = ("model.position", "model.scaling", "model.factor")  # settings; the last two are of pretrained models
PRIVATE = ("seed_everything", "run_dir", "config", "ckpt_path")  # settings that differ from run to run


def inconsistencies(runs: Runs) -> list[str]:
    """Describe differences between runs that make a comparison meaningless; none if it is sound.

    These are settings, other than the seed, in which runs of one strategy differ, because their mean has no meaning;
    and differences between tests in what or how much they scored, because strategies then differ by more than their
    positions.
    """
    inconsistencies = []
    members: dict[str, list[tuple[Run, dict[str, Any]]]] = {}
    for run, config in public_configs(runs).items():
        members.setdefault(run.label, []).append((run, config))
    for label, of_label in members.items():
        for key in dict.fromkeys(key for _, config in of_label for key in config):
            values = {str(config.get(key)) for _, config in of_label}
            if len(values) > 1 and not all(config.get(key) == run.seed for run, config in of_label):
                inconsistencies.append(f"{label}: {key}: {' | '.join(sorted(values))}")
    inconsistencies += [f"{protocol}: {' | '.join(text)}" for protocol, text in runs.text.items() if len(text) > 1]
    return inconsistencies + _precisions(runs) + _unequal(runs.results)


def _precisions(runs: Runs) -> list[str]:
    """The precisions of training if there are several, with the runs of all but the most frequent one."""
    members: dict[str, list[str]] = {}
    for run, environment in runs.environments.items():
        if "precision" in environment:
            members.setdefault(environment["precision"], []).append(f"{run.label} seed {run.seed}")
    usual, *others = sorted(members, key=lambda precision: -len(members[precision])) or [""]
    odd = " | ".join(f"{precision} ({', '.join(members[precision])})" for precision in others)
    return [f"precision: {usual} | {odd}"] if odd else []


def _unequal(results: pd.DataFrame) -> list[str]:
    """Protocols that scored different numbers of targets in different runs, each at the first such length."""
    inconsistencies: dict[str, str] = {}
    for (_, protocol, length), group in results.groupby(CELL, sort=False):
        usual = group["count"].mode()[0]
        counts = [f"{usual:,.0f}"]
        for count, odd in group[group["count"] != usual].groupby("count", sort=False):
            names = (f"{strategy} seed {seed}" for strategy, seed in zip(odd["strategy"], odd["seed"], strict=True))
            counts.append(f"{count:,.0f} ({', '.join(names)})")
        if len(counts) > 1:
            inconsistencies.setdefault(str(protocol), f"{protocol} at {length}: scored per run: {' | '.join(counts)}")
    return list(inconsistencies.values())


def only_positions_differ(runs: Runs) -> bool:
    firsts: dict[tuple[str, int], dict[str, Any]] = {}
    for run, config in public_configs(runs).items():
        first = firsts.setdefault((run.part, run.seed), config)
        if any(first.get(key) != config.get(key) for key in first | config if not key.startswith(POSITIONAL)):
            return False
    return True


def public_configs(runs: Runs) -> dict[Run, dict[str, Any]]:
    """The configurations without seeds and directories, which differ from run to run."""
    return {
        run: {
            key: value
            for key, value in config.items()
            if value is not None and key not in PRIVATE and not LOCATIONS.fullmatch(key)
        }
        for run, config in runs.configs.items()
    }
