"""Planned runs: which of them are missing, and which results are read.

Runs that are not planned, such as those of other seeds, are not read. PLAN.md allows no looks in between. The results
of `main` and `main-rfc` are therefore read only when all runs of the strategies of the four questions are finished, and
those of another strategy only when all its seeds are.
"""

from pathlib import Path

from kerple.compare.comparison_file import read_comparison
from kerple.compare.finished_runs import FinishedRun
from kerple.compare.run_discovery import recorded_runs

CONFIGS = Path(__file__).parents[2] / "configs/compare"
PLANNED = ("main", "main-rfc")  # the comparisons of PLAN.md
LATER = ("dilution", "dilution-heads", "dilution-ratio", "extend-by-training")  # those of later plans
IN_QUESTIONS = {"KerpleLog", "ALiBi", "RNoPE-SWA", "KerplePower"}


def seeds(name: str) -> dict[str, list[int]]:
    """The seeds of a planned comparison by strategy."""
    plan = read_comparison(str(CONFIGS / f"{name}.yaml"))
    return {label: [run.seed for run in plan.planned_runs() if run.label == label] for label in plan.strategies}


def missing_seeds(root: Path, name: str) -> dict[str, list[int]]:
    """The seeds of a planned comparison that have no record in ``root``, by strategy. Some lists may be empty."""
    recorded = {(run.strategy, run.seed) for run in recorded_runs(root / name)}
    return {label: [seed for seed in of if (label, seed) not in recorded] for label, of in seeds(name).items()}


def readable_runs(root: Path, name: str) -> list[FinishedRun]:
    """The recorded runs of a comparison that may be read, which can be none. With a plan, only planned runs are."""
    runs = recorded_runs(root / name)
    if name in (*PLANNED, *LATER):
        planned = seeds(name)
        runs = [run for run in runs if run.seed in planned.get(run.strategy, [])]
    if name not in PLANNED:
        return runs
    missing = missing_seeds(root, name)
    if any(missing.get(strategy) for strategy in IN_QUESTIONS):
        return []
    return [run for run in runs if not missing[run.strategy]]


def progress(root: Path) -> str:
    """A sentence on how many planned runs are finished, and one on those that are missing."""
    planned = sum(len(of) for name in PLANNED for of in seeds(name).values())
    missing = [(name, label, of) for name in PLANNED for label, of in missing_seeds(root, name).items() if of]
    finished = planned - sum(len(of) for *_, of in missing)
    listed = "; ".join(f"`{label}`{' on rfc' * (name != 'main')} {str(of)[1:-1]}" for name, label, of in missing)
    first = f"Of the {planned} runs of [PLAN.md](PLAN.md), {finished} are finished."
    return f"{first} Missing seeds: {listed}." if missing else first
