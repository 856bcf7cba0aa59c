"""The table of second stages: runs that start from the weights of a parent, compared with the parent and a control."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from kerple.compare.estimates import by_block, difference
from kerple.compare.finished_runs import Runs
from kerple.compare.table_markup import NOTHING, Cell, Table
from kerple.compare.tables import format_estimate, gain_cell, loss_differences
from kerple.config.flat_configuration import configured_length

BOUND = 0.005  # largest accepted increase of the loss at the parent's training length, relative to the parent


def stage_tables(runs: Runs) -> Iterator[Table]:
    """Yield a table for each part and parent, with a row for the parent and for each strategy that starts from it."""
    configs: dict[str, dict[str, dict[str, Any]]] = {}  # of the first seed of each part and strategy
    for run, config in runs.configs.items():
        configs.setdefault(run.part, {}).setdefault(run.strategy, config)
    for part, of_part in configs.items():
        for parent, config in of_part.items():
            starts = (parent, config.get("model.path", parent))  # a parent that is a pretrained model has a path
            stages = {label: c for label, c in of_part.items() if label != parent and c.get("weights") in starts}
            if stages and (table := _table(runs, part, parent, of_part, stages)):
                yield table


def _table(
    runs: Runs, part: str, parent: str, configs: dict[str, dict[str, Any]], stages: dict[str, dict[str, Any]]
) -> Table | None:
    """Return the table of the stages of one parent; None without losses of the parent at its training length.

    The control is the first stage with the strategy and the training length of the parent. The configuration of a
    pretrained model has neither. Its training length is then the shortest one of the stages, and the control is the
    first stage with this length.

    Args:
        runs: The runs.
        part: Part of the comparison.
        parent: Label of the parent.
        configs: The configurations of all strategies of the part, with dotted keys, by label.
        stages: Those of the stages.
    """
    config = configs[parent]
    pretrained, lengths = "model.path" in config, {label: configured_length(c) for label, c in stages.items()}
    short = min(length or 0 for length in lengths.values()) if pretrained else configured_length(config)
    alike = [label for label, length in lengths.items() if length == short]
    controls = [label for label in alike if pretrained or _same_position(stages[label], config)]
    full = f"{part} full".strip()
    losses = runs.blocks[runs.blocks["metric"] == "ppl"]
    of = dict(iter(losses.groupby(["strategy", "protocol", "length"])))
    if (parent, full, short) not in of:
        return None
    longest = int(losses["length"][losses["protocol"] == full].max())
    protocols = _gain_protocols(runs, part)
    estimates = {name: loss_differences(runs.blocks, *pair) for name, pair in protocols.items()}
    gains = {name: {cell: gain_cell(gain) for cell, gain in of_name.items()} for name, of_name in estimates.items()}
    others = {parent: (parent, full)}
    others |= {
        f"{parent} with {near.removeprefix(part).strip()}": (parent, near)
        for name, (near, far) in protocols.items()
        if far == full and (parent, longest) in estimates[name]  # not of windows that only stages have
    }
    others |= {control: (control, full) for control in controls[:1]}
    against = partial(_against, of, pretrained=parent if pretrained else None)
    rows = {}
    for label in (parent, *stages):
        ours = (label, full)
        rows[label] = {
            "training tokens": Cell(_tokens(runs, part, label, configs)),
            f"loss at {short}, % against {parent}": against(ours, (parent, full), short, relative=True),
            **{f"loss at {longest} minus {name}": against(ours, other, longest) for name, other in others.items()},
            **{f"{name} at {longest}": of_name.get((label, longest), NOTHING) for name, of_name in gains.items()},
        }
    note = (
        f"Losses in nats per token, {full}. Differences are computed for each seed. The bound at {short} is "
        f"+{BOUND:.1%}: it is bold if the upper end of its interval, or its value with one seed, is within the bound. "
        "Other differences are bold if the whole interval shows an improvement. "
        "Distant text is the text before the last L inputs, where L is the training length of the row."
    )
    if any(protocol != full for _, protocol in others.values()):
        note += f" If {parent} fails at {longest} tokens, it is a stronger reference with a window."
    note += f" Control: {controls[0]}." if controls else " No stage has the strategy and length of the parent."
    return Table(f"Second stages of {parent}{part and f', {part}'}", pd.DataFrame.from_dict(rows, orient="index"), note)


def _same_position(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two configurations with dotted keys have the same positional strategy with the same options."""
    return all(one.get(key) == other.get(key) for key in one | other if key.startswith("model.position"))


def _gain_protocols(runs: Runs, part: str) -> dict[str, tuple[str, str]]:
    """Return the protocols of each gain by its name: that without the text, and that with it."""
    names = [name for name in runs.blocks["protocol"].unique() if name.rpartition(" ")[0] == part]
    gains = dict[str, tuple[str, str]]()
    for name in names:
        if name.split()[-1].startswith("windowed"):
            gains[f"gain beyond {name.rpartition('windowed')[2]}"] = (name, f"{part} full".strip())
        if "far_own" in name:
            gains["far gain"] = (name.replace("far_own", "far_none"), name)
    return gains


def _against(
    of: dict[Any, pd.DataFrame],
    one: tuple[str, str],
    other: tuple[str, str],
    length: int | None,
    pretrained: str | None = None,
    relative: bool = False,
) -> Cell:
    """Return the loss of a strategy minus that of another one at a length, over the seeds of the first one.

    Args:
        of: Sums of losses by block, by strategy, protocol and length.
        one: The strategy and its protocol.
        other: The other strategy and its protocol. It has the same seeds, or is pretrained.
        length: The length.
        pretrained: Label of the pretrained model, which has one seed; None if there is none.
        relative: Whether to divide the difference by the loss of the other strategy; the result is in percent.
    """
    if one == other or (*one, length) not in of or (*other, length) not in of:
        return NOTHING
    seeds = sorted(set(of[*one, length]["seed"]))
    ours, theirs = by_block(of[*one, length], seeds), by_block(of[*other, length], seeds)
    if other[0] == pretrained and (alone := by_block(of[*other, length])) is not None:
        theirs = np.repeat(alone[0], len(seeds), 0), np.repeat(alone[1], len(seeds), 0)
    change = difference(ours, theirs, same_runs=True)
    if theirs is None or change is None:
        return NOTHING
    scale = 100 * theirs[1].sum() / theirs[0].sum() if relative else 1.0
    mean, low, high = (scale * value for value in (change.mean, *change.interval()))
    if relative:
        return Cell(format_estimate("+.2f", mean, low, high), (mean if math.isnan(high) else high) <= 100 * BOUND)
    return Cell(format_estimate("+.4f", mean, low, high), bool(high < 0))


def _tokens(runs: Runs, part: str, label: str, configs: dict[str, dict[str, Any]]) -> str:
    """Return the training tokens of a strategy after those of the earlier fits of its weights; – if not known."""
    known, numbers = runs.costs if "part" in runs.costs else runs.costs.assign(part=""), list[str]()
    seen = set[str]()
    while label in configs and label not in seen:  # a stage may have the name of the model from which it started
        seen.add(label)
        config = configs[label]
        trained = [of for run, of in runs.environments.items() if (run.part, run.strategy) == (part, label)]
        devices = [int(environment.get("devices", 1)) for environment in trained]
        steps = known[(known["strategy"] == label) & (known["part"] == part)].get("steps")
        most_steps = None if steps is None else steps.max()
        batch, accumulated = config.get("data.init_args.batch_size"), config.get("trainer.accumulate_grad_batches", 1)
        factors: list[Any] = [batch, accumulated, max(devices, default=1), configured_length(config), most_steps]
        numbers.insert(0, "–" if any(pd.isna(factor) for factor in factors) else f"{math.prod(map(int, factors)):,}")
        label = config.get("weights") or ""
    return " + ".join(numbers)
