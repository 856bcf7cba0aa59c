"""`python -m results.judge.challenge results`: check the entries of the challenge, and write the page of its standings.

An entry is a folder in ``challenge`` with the records of one strategy that configs/compare/challenge.yaml gave, and
the file of the strategy if it is none of the package. The page is challenge.md with the standings of all entries and of
main.
"""

import ast
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kerple.base.errors import UserError, require
from kerple.compare import committed_records
from kerple.compare.comparison_file import Comparison, read_comparison
from kerple.compare.finished_runs import FinishedRun, read_runs
from kerple.compare.planned_run import PlannedRun
from kerple.compare.resolution import resolve
from kerple.compare.run_discovery import recorded_runs
from kerple.config.flat_configuration import configured_length
from kerple.config.user_code_digests import DEFINITIONS, own_classes
from kerple.measure import results_table
from kerple.positions import names
from results.judge.evidence import Tier
from results.judge.plan import CONFIGS
from results.judge.statements import evaluate, with_interval

PAGE = Path(__file__).with_suffix(".md")
REFERENCE = "KerpleLog"  # strategy of which the differences are shown, and whose recipe is that of every entry
NAME = r"[\w.+-]+( [\w.+-]+)*"  # of an entry, which is in tables and expressions
FAR = ("far_own", "far_none")  # beginnings of the names of protocols: with the model's own distant text, and without
STRATEGY = re.compile(r"model\.position[.:]")  # options that begin with this are those of the strategy, and free
# sha256 of the test's text, which the earlier records of main lack
TEXT = "93ec9fe5572e335a2bb29373d308f1b0e8a4decf99d46478887421feb4b0566b"
MODULES = {"kerple", "numpy", "torch", *sys.stdlib_module_names}  # what the files of an entry may import


Target = tuple[str, str, int, int, int]  # metric, protocol, length and block of a loss, and its number of targets


def reasons_to_refuse(
    entry: Path, challenge: Comparison, recipe: dict[int, PlannedRun], targets: list[Target]
) -> list[str]:
    """Return the reasons why an entry is refused; empty if it is accepted.

    Args:
        entry: Folder of the entry.
        challenge: The challenge.
        recipe: The runs of `REFERENCE` by seed, resolved, with the checksum of their data.
        targets: `targets_of` the losses of main.
    """
    try:
        runs = recorded_runs(entry)
        labels = {run.strategy for run in runs}
        # the standings read runs by strategy and seed, so that two entries must not have the same strategy
        if labels != {entry.name} or entry.name in challenge.strategies:
            expected = "one strategy with the name of the folder, which no strategy of main has"
            return [f"runs of {', '.join(sorted(labels)) or 'no strategy'}, expected {expected}"]
        if (seeds := sorted(run.seed for run in runs)) not in (planned := sorted(recipe), planned[:1]):
            return [f"seeds {str(seeds)[1:-1]}, expected {str(planned)[1:-1]}, or {planned[0]} alone"]
        if not re.fullmatch(NAME, entry.name):
            return ["a name with other characters than letters, digits, single spaces and ._+-"]
        if parts := {run.part for run in runs} - {""}:
            return [f"records in {min(parts)}, expected records in {entry.name}/seed-N"]
        read_runs(runs)  # reads all files
        first = results_table.read(runs[0].folder)[1]["run"]
        reasons = [(run.seed, reason) for run in runs for reason in _reasons(run, recipe[run.seed], targets, first)]
        return [f"seed {seed}: {reason}" for seed, reason in reasons] or list(_missing_sources(entry, first["config"]))
    except (UserError, SyntaxError, *committed_records.UNREADABLE) as error:
        return [f"cannot be read ({re.sub(rf'{re.escape(tempfile.gettempdir())}/[^/]+/', '', str(error))})"]


def _reasons(run: FinishedRun, planned: PlannedRun, targets: list[Target], first: dict[str, Any]) -> Iterator[str]:
    """Yield the reasons to refuse a run of an entry.

    Args:
        run: The run.
        planned: The run of `REFERENCE` with the same seed.
        targets: `targets_of` the losses of main.
        first: The entry ``run`` in the results of the first seed, which has the same strategy.
    """
    rows, about = results_table.read(run.folder)
    made = about["run"]
    yield from (each for each in committed_records.changed_fit(made, planned) if not STRATEGY.match(each))
    # an option that only one of them has may be newer than the code of the other
    for name in sorted(name for name in made["config"].keys() & first["config"].keys() if STRATEGY.match(name)):
        if made["config"][name] != first["config"][name]:
            yield f"{name}: {made['config'][name]} -> {first['config'][name]} of the first seed"
    if made["inputs"] != first["inputs"]:
        yield "not the source code of the first seed"
    yield from (f"test: {each}" for each in committed_records.changed_test(made, planned))
    yield from (f"test: {name}, expected the data of the fit" for name in made["test"] if name.startswith("data."))
    if about["evaluations"]["far_context"].get("text", TEXT) != TEXT:
        yield "test: another text"
    if not isinstance(made["cost"].get("parameters"), int):
        yield "no number of parameters"
    if (devices := made["cost"].get("environment", {}).get("devices", "1")) != "1":
        yield f"trained on {devices} devices, expected 1"
    protocols = rows["protocol"][rows["length"] == 16 * (configured_length(planned.training) or 0)]
    if not all(protocols.str.startswith(name).any() for name in FAR):
        yield "no losses with and without distant text at 16 training lengths"
    elif targets_of(rows) != targets:
        yield "the losses with and without distant text have other targets than those of main"
    if not np.isfinite(results_table.totals(rows)["sum"]).all():
        yield "a loss is not finite"


def targets_of(rows: pd.DataFrame) -> list[Target]:
    """Return the targets of all losses with and without distant text in the results of a run."""
    far = rows[rows["protocol"].str.startswith(FAR)]
    return sorted(far[["metric", "protocol", "length", "block", "count"]].itertuples(index=False, name=None))


def _missing_sources(entry: Path, config: dict[str, Any]) -> Iterator[str]:
    """Yield what the folder of an entry lacks of the source code of its strategy.

    Args:
        entry: Folder of the entry. Its files are parsed, and nothing in them is executed.
        config: Configuration of its fit with dotted keys.
    """
    paths = [str(value) for key, value in config.items() if STRATEGY.match(key) and key.endswith("class_path")]
    if not paths:
        yield "no strategy"
    yield from (f"{path} is no strategy of kerple" for path in paths if "." not in path and path not in names())
    own = own_classes(config)
    for module in (waiting := sorted({path.rpartition(".")[0] for path in own})):  # imports are added in the loop
        file = f"{module.replace('.', '/')}.py"
        if not (entry / file).is_file():
            yield f"no {file} in the folder"
            continue
        tree = ast.parse((entry / file).read_bytes())
        found = {node.name for node in tree.body if isinstance(node, DEFINITIONS)}
        needed = [name for package, _, name in (path.rpartition(".") for path in own) if package == module]
        yield from (f"no definition of {name} in {file}" for name in needed if name not in found)
        imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        imported += [node.module or node.names[0].name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        others = {name for name in imported if name.partition(".")[0] not in MODULES}
        waiting += sorted(others - set(waiting))


def standings(tier: Tier) -> str:
    """Return the table of all strategies of a tier, by the sum of their ranks in own loss and gain at 16×.

    Strategies with one seed come last and have no rank, because a difference of one seed may be chance.
    """
    length = 16 * tier.trained
    losses = {
        name: [tier.losses(name, far, length).of_seed for far in FAR]
        for name in sorted(set(tier.runs.results["strategy"]))
    }
    parameters = tier.runs.costs.groupby("strategy")["parameters"].max()
    own = {name: float(of[0].mean()) for name, of in losses.items()}
    gain = {name: float((of[1] - of[0]).mean()) for name, of in losses.items()}
    ranked = [name for name, of in losses.items() if len(of[0]) > 1]
    by_own, by_gain = sorted(ranked, key=lambda name: own[name]), sorted(ranked, key=lambda name: -gain[name])
    ranks = {name: (by_own.index(name) + 1, by_gain.index(name) + 1) for name in ranked}
    order = sorted(ranked, key=lambda name: (sum(ranks[name]), own[name]))
    places = {name: str(place) for place, name in enumerate(order, start=1)}
    unranked = sorted((name for name in losses if name not in ranks), key=lambda name: own[name])
    lines = [
        "| place | strategy | seeds | own loss (rank) | gain (rank) | own loss, difference | gain, difference "
        "| parameters |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in (*order, *unranked):
        of_own, of_gain = [f" ({rank})" for rank in ranks.get(name, ())] or ["", ""]
        cells = [f"{own[name]:.3f}{of_own}", f"{gain[name]:+.3f}{of_gain}".replace("-", "−")]
        mine, theirs = f"own:{name}[16x]", f"own:{REFERENCE}[16x]"
        gains = f"none:{name}[16x] / {mine} * {theirs} / none:{REFERENCE}[16x]"
        for expression in (f"{mine} / {theirs}", gains):
            found = evaluate(expression, tier).estimate
            cells.append("–" if name == REFERENCE else with_interval(found.mean, *found.interval()))
        cells.append(f"{parameters[name]:,}")
        lines.append(f"| {places.get(name, '–')} | {name} | {len(losses[name][0])} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page(root: Path) -> str:
    """Return the content of the challenge's page, from the records in a folder of results."""
    challenge = read_comparison(str(CONFIGS / "challenge.yaml"))
    of_main = [run for run in recorded_runs(root / "main") if run.strategy == REFERENCE]
    require(bool(of_main), "results", root, "the folder of the comparisons' reports, such as results")
    rows, about = results_table.read(of_main[0].folder)
    data, targets = about["run"]["data"], targets_of(rows)
    runs = [run for run in challenge.planned_runs() if run.label == REFERENCE]
    planned = {run.seed: replace(resolve(run), data=data) for run in runs}
    entries = sorted(path for path in (root / "challenge").glob("[!.]*") if path.is_dir())
    refused = {path.name: found for path in entries if (found := reasons_to_refuse(path, challenge, planned, targets))}
    accepted = [f"challenge/{path.name}" for path in entries if path.name not in refused]
    tier = Tier(root, "challenge", ["main", *accepted], 128, "the challenge")
    # a name or a message may contain line breaks
    lines = "\n".join(" ".join(f"- {name}: {'; '.join(found)}".split()) for name, found in refused.items())
    return PAGE.read_text().format(
        seeds=", ".join(map(str, challenge.seeds)),
        first=min(challenge.seeds),
        standings=standings(tier),
        refused=f"Refused:\n\n{lines}\n" if refused else "",
    )


def main(arguments: list[str]) -> None:
    """Write the page challenge/README.md in a folder of results, and print it. The default folder is ``results``.

    Raises:
        UserError: If the folder has no records of main.
    """
    root = Path(arguments[0] if arguments else "results")
    text = page(root)
    (root / "challenge").mkdir(exist_ok=True)
    (root / "challenge/README.md").write_text(text)
    print(text)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
