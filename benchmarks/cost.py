"""Cost of each strategy of results/earlier/beyond-128: ``python -m benchmarks.cost``.

The seconds of each round, for a training step and for a forward pass of 16 times the training length, are written to
results/cost/costs.csv. A table with memory, parameters and perplexities of the committed runs is written to
results/cost/table.md.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import yaml

from benchmarks.measure import in_turn, machine, peak_above
from benchmarks.models import build, training_step
from kerple.compare.comparison_file import Strategy
from kerple.compare.estimates import estimate, over_seeds
from kerple.compare.finished_runs import read_runs
from kerple.compare.run_discovery import recorded_runs
from kerple.compare.table_markup import Cell, Table
from kerple.measure.protocols import full
from kerple.model import Transformer
from kerple.training.throughput import count_position_parameters

ROOT = Path(__file__).parents[1]
TIER = "earlier/beyond-128"
BATCH, LENGTH, READ = 8, 128, 2048  # batch and length of configs/small.yaml, and 16 times this length
BASELINE = "NoPE"
MEMORY = 'from benchmarks.cost import step; measured = step("{strategy}")'  # a script for `peak_above`


def compared() -> dict[str, Strategy]:
    """Return the strategies of the comparison by their labels, and DAPE, which was too expensive for it."""
    entries = yaml.safe_load((ROOT / f"results/{TIER}/comparison.yaml").read_text())["strategies"] | {"DAPE": None}
    return {label: Strategy(**(entry or {})) for label, entry in entries.items()}


def network(label: str) -> Transformer:
    """Build the demo's model with a strategy of the comparison."""
    torch.manual_seed(0)
    strategy = compared()[label]
    return build("demo", strategy.position or label, LENGTH, **strategy.options)


def step(strategy: str) -> Callable[[], None]:
    """Return a function that makes a training step in fp32."""
    return training_step(network(strategy), BATCH, LENGTH, bf16=False)


def reading(strategy: str) -> Callable[[], None]:
    """Return a function that computes the losses of a segment of 16 times the training length in fp32."""
    model, tokens = network(strategy).eval(), torch.randint(2048, (1, READ + 1))

    def run() -> None:
        with torch.inference_mode():
            full(model, tokens, READ)

    return run


def rounds(strategies: list[str], count: int) -> pd.DataFrame:
    """Measure the seconds of a step and of a long forward pass in each round, and the memory of each strategy."""
    runs = {f"step {strategy}": step(strategy) for strategy in strategies}
    runs |= {f"reading {strategy}": reading(strategy) for strategy in strategies}
    seconds = in_turn(runs, count)
    tables = []
    for strategy in strategies:
        columns = {
            "strategy": strategy,
            "seed": range(count),  # index of the round
            "tokens_per_second": BATCH * LENGTH / np.array(seconds[f"step {strategy}"]),
            "step_seconds": seconds[f"step {strategy}"],
            "read_seconds": seconds[f"reading {strategy}"],
            "position_parameters": count_position_parameters(network(strategy)),
            "memory_mib": peak_above(MEMORY.format(strategy=strategy)),
        }
        tables.append(pd.DataFrame(columns))
    return pd.concat(tables)


def table(measured: pd.DataFrame, perplexities: pd.Series) -> Table:
    """Return the table of seconds, ratios to the baseline with 95% intervals, memory, parameters and perplexities."""
    rows: dict[str, dict[str, Cell]] = {}
    for strategy, group in measured.groupby("strategy", sort=False):
        row = {"position parameters": f"{group['position_parameters'].iloc[0]:,}"}
        for column, name in (("step_seconds", "step"), ("read_seconds", f"reading {READ}")):
            row[f"{name} (ms)"] = f"{1000 * group[column].median():.0f}"
            row[f"{name} ÷ {BASELINE}"] = "1" if strategy == BASELINE else _ratio(measured, str(strategy), column)
        row["memory of a step (MiB)"] = f"{group['memory_mib'].iloc[0]:,.0f}"
        for length in (LENGTH, READ):
            mean = perplexities.get((strategy, length))
            row[f"perplexity at {length}"] = "–" if mean is None else f"{mean:.2f}"
        rows[str(strategy)] = {name: Cell(text) for name, text in row.items()}
    at = machine()
    note = (
        f"Medians of {measured['seed'].nunique()} rounds, strategies in turn; ratios: geometric means over rounds with "
        f"95% intervals. Steps of {BATCH} × {LENGTH} tokens, forward, backward, clipping and AdamW, fp32. {at['cpu']}, "
        f"{at['threads']} of {at['cores']} cores, load {at['load']:.1f}, torch {at['torch']}. Perplexities are of "
        f"{TIER}, means over its seeds."
    )
    return Table("Cost of each strategy", pd.DataFrame.from_dict(rows, orient="index"), note)


def _ratio(measured: pd.DataFrame, strategy: str, column: str) -> str:
    """Format the ratio of a strategy's seconds to those of the baseline, with its interval."""
    by_round = measured.pivot(index="seed", columns="strategy", values=column)
    mean = estimate(over_seeds(pd.Series(np.log(by_round[strategy] / by_round[BASELINE]))))
    low, high = np.exp(mean.interval())
    return f"{np.exp(mean.mean):.2f} [{low:.2f}, {high:.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    measured = rounds(list(compared()), parser.parse_args().rounds)
    folder = ROOT / "results/cost"
    folder.mkdir(exist_ok=True)
    results = read_runs(recorded_runs(ROOT / f"results/{TIER}")).results.query("metric == 'ppl' and protocol == 'full'")
    costs = table(measured, results.groupby(["strategy", "length"])["value"].mean())
    measured.to_csv(folder / "costs.csv", index=False, float_format="%.6g")
    (folder / "table.md").write_text(f"# cost\n\n{costs.markdown()}")
    print(costs.markdown())


if __name__ == "__main__":
    main()
