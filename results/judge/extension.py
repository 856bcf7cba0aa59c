"""`python -m results.judge.extension results`: the answer to the question D4 of PLAN-extension.md.

`python -m results.judge.extension results errors` prints error rates of the answers on simulated runs instead.
"""

import math
import sys
from collections import Counter
from copy import copy
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kerple.compare.stages import BOUND
from results.judge import questions
from results.judge.evidence import Tier, Value
from results.judge.plan import missing_seeds, seeds
from results.judge.statements import evaluate, with_interval

COMPARISON = "extend-by-training"
STRATEGIES = ("NoPE", "KerpleLog", "RNoPE-SWA")
STAGES = tuple(f"{strategy} {length}" for length in (128, 512) for strategy in STRATEGIES)
WITH_ROPE = ("RoPE 512", "YaRN 512", "larger base 512")  # further stages, which are reported but are no question
FROM_SCRATCH = {"KerpleLog": "KerpleLog", "RNoPE-SWA": "RNoPE-SWA temperature"}  # the same strategies in main
OWN_LOSS, GAIN = 0.05, 0.02  # effects of interest in nats
ANSWERS = ("longer", "short", "from scratch")  # columns of `stage_answers`

# columns of the report, in nats, by the expression of a stage
COLUMNS = {
    "own loss minus parent": "own:{0}[2048] / own:parent[2048]",
    "minus RoPE 128": "own:{0}[2048] / own:RoPE 128[2048]",
    "minus RoPE 512": "own:{0}[2048] / own:RoPE 512[2048]",
    "gain": "windowed:{0}[2048] / {0}[2048]",
    "loss at 128 minus parent": "{0}[128] / parent[128]",
    "loss at 2,048 minus parent with a window": "{0}[2048] / windowed:parent[2048]",  # found afterwards, no endpoint
}
Question = dict[str, float]
"""Statements, each with its effect of interest in nats, see `results.judge.questions`."""

LONGER: dict[str, Question] = {
    stage: {
        f"own:parent[2048] / own:{stage}[2048] > 1": OWN_LOSS,
        f"own:RoPE 128[2048] / own:{stage}[2048] > 1": OWN_LOSS,
        f"{COLUMNS['gain'].format(stage)} > 1": GAIN,
    }
    for stage in STAGES
}


def at_most(ours: str, theirs: str, bound: float) -> Question:
    """The statement that a loss exceeds another one by at most a bound in nats. *No* if it exceeds it by more."""
    return {f"{theirs} / {ours} > {math.exp(-bound)}": -bound}


def stage_answers(of_parents: Any, with_main: Any) -> pd.DataFrame:
    """Return an answer in each of `ANSWERS` to each of `STAGES`: yes, no, inconclusive, or *not tested*.

    - *longer*: at 2,048 tokens the own loss is below that of the parent and below that of RoPE 128, and the gain is
      above 0.
    - *short*: the loss at 128 tokens is at most 0.5% above that of the parents.
    - *from scratch*: the own loss at 2,048 tokens is at most 0.05 nats above that of the strategy in main.

    The rule of `results.judge.questions` is used for each column, with its correction over the stages.

    Args:
        of_parents: The runs, as a `Tier` whose samples are parents.
        with_main: The runs and those of main, as a `Tier` whose samples are seeds.
    """
    bound = BOUND * evaluate("parent[128]", of_parents).estimate.mean
    short = {stage: at_most(f"{stage}[128]", "parent[128]", bound) for stage in STAGES}
    scratch = {
        f"{strategy} {length}": at_most(f"own:{strategy} {length}[2048]", f"own:{theirs}[2048]", OWN_LOSS)
        for length in (128, 512)
        for strategy, theirs in FROM_SCRATCH.items()
    }
    cases = zip(ANSWERS, (of_parents, of_parents, with_main), (LONGER, short, scratch), strict=True)
    found = {name: questions.answers(tier, of_stages) for name, tier, of_stages in cases}
    table = {name: {stage: of.answer for stage, of in answers.items()} for name, answers in found.items()}
    return pd.DataFrame(table, index=list(STAGES)).fillna("not tested")


def conclusion(table: pd.DataFrame) -> str:
    """Return the answer to D4 from the answers of `stage_answers`.

    *Yes* if a stage has *yes* for *longer* and *short*. Else *at a price* if a stage has *yes* for *longer* and *no*
    for *short*. Else *no* if all stages have *no* for *longer*. Else *inconclusive*.
    """
    longer, short = table["longer"], table["short"]
    if (both := (longer == "yes") & (short == "yes")).any():
        return f"yes ({', '.join(table.index[both])})"
    if (price := (longer == "yes") & (short == "no")).any():
        return f"at a price ({', '.join(table.index[price])})"
    return "no" if (longer == "no").all() else "inconclusive"


def report(of_parents: Any, with_main: Any) -> str:
    """Return the answer to D4, and Markdown tables of the stages. The arguments are those of `stage_answers`."""
    table = stage_answers(of_parents, with_main)
    lines = [f"**D4. Does a second stage with another strategy extend a model with RoPE?** {conclusion(table)}", ""]
    lines += [f"| stage | {' | '.join([*ANSWERS, *COLUMNS])} |", f"|{' --- |' * (1 + len(ANSWERS) + len(COLUMNS))}"]
    for stage in (*STAGES, *WITH_ROPE):
        cells = list(table.loc[stage]) if stage in STAGES else ["–"] * len(ANSWERS)
        for of_stage in COLUMNS.values():
            of_itself = f"own:{stage}[2048] / own:{stage}[2048]" == (expression := of_stage.format(stage))
            cells.append("–" if of_itself else _nats(expression, of_parents))
        lines.append(f"| {' | '.join([stage, *cells])} |")
    lines += ["", "| minus main, trained in bf16 | loss at 128 | own loss at 2,048 |", "| --- | --- | --- |"]
    pairs = {"parent": "RoPE"} | {stage: FROM_SCRATCH.get(stage.rpartition(" ")[0], "") for stage in STAGES}
    for ours, theirs in pairs.items():
        if theirs:
            numbers = [f"{ours}[128] / {theirs}[128]", f"own:{ours}[2048] / own:{theirs}[2048]"]
            lines.append(f"| {ours} minus {theirs} | {' | '.join(_nats(each, with_main) for each in numbers)} |")
    return "\n".join(lines)


def _nats(expression: str, tier: Any) -> str:
    found = evaluate(expression, tier).estimate
    return with_interval(found.mean, *found.interval())


def missing(root: Path) -> str:
    """Return one line that names the missing runs; empty if none is missing."""
    of_label = {label: of for label, of in missing_seeds(root, COMPARISON).items() if of}
    planned, number = (sum(map(len, of.values())) for of in (seeds(COMPARISON), of_label))
    listed = "; ".join(f"{label} {str(of)[1:-1]}" for label, of in of_label.items())
    return f"D4 is not answered: {number} of {planned} runs are missing: {listed}" if of_label else ""


def tiers(root: Path) -> tuple[Tier, Tier]:
    """Return the runs, and the runs with those of main, see `stage_answers`."""
    about = (128, "planned in results/PLAN-extension.md")
    of_parents = Tier(root, COMPARISON, [COMPARISON], *about, samples="parents")
    return of_parents, Tier(root, COMPARISON, [COMPARISON, "main"], *about)


def answers(root: Path) -> str:
    """Return the report of the records in a folder; one line with the missing runs if there are any."""
    return missing(root) or report(*tiers(root))


def page(root: Path) -> str:
    """Return the content of extend-by-training/answers.md."""
    return f"{(Path(__file__).with_name('extension.md')).read_text()}\n{answers(root)}\n"


class SimulatedStages:
    """Losses of parents, stages and main with normally distributed effects of seeds and packages, as `Tier` has them.

    Effects have the covariances of main: over the seeds of a strategy, and over packages of all strategies jointly. A
    stage has those of another strategy in main than the one with which it is compared, because two runs of one strategy
    differ between packages too. Parents and RoPE 128 have those of RoPE.

    Args:
        main: The results of main.
    """

    trained = 128
    cells: ClassVar = [("far_own", 2048), ("windowed", 2048), ("full", 2048), ("full", 128)]
    of_main: ClassVar = {
        "parent": "RoPE",
        "RoPE 128": "RoPE",
        **{f"NoPE {length}": "RNoPE-SWA" for length in (128, 512)},
        **{f"KerpleLog {length}": "KerplePower" for length in (128, 512)},
        **{f"RNoPE-SWA {length}": "FoX" for length in (128, 512)},
        **{name: name for name in FROM_SCRATCH.values()},
    }

    def __init__(self, main: Tier) -> None:
        self.generator, self.samples = np.random.default_rng(0), "seeds"
        self.names = list(dict.fromkeys(self.of_main.values()))
        measured = {name: np.stack([self._loss(main, name, *cell) for cell in self.cells]) for name in self.names}
        self.roots = {name: _root(np.cov(of.mean(2))) for name, of in measured.items()}  # of (cells, seeds, packages)
        self.seeds = {name: measured[name].shape[1] for name in FROM_SCRATCH.values()}
        self.packages = _root(np.cov(np.concatenate([of.mean(1) for of in measured.values()])))

    @staticmethod
    def _loss(main: Tier, strategy: str, protocol: str, length: int) -> NDArray[np.float64]:
        blocks = main.losses(strategy, protocol, length).blocks
        assert blocks is not None
        return np.asarray(blocks[0] / blocks[1])

    def draw(self, own: float, gain: float, short: float, scratch: float, correlation: float) -> None:
        """Draw all runs, three seeds of each stage.

        Args:
            own: Own loss of each stage at 2,048 tokens, minus that of the parent and of RoPE 128.
            gain: Gain of each stage at 2,048 tokens.
            short: Loss of each stage at 128 tokens, minus that of the parent, relative to it.
            scratch: Own loss of each stage at 2,048 tokens, minus that of the strategy in main.
            correlation: Correlation of the effect of a stage's seed with that of its parent.
        """
        loss = 2.76  # of RoPE in main at 128 tokens
        drawn = self.packages @ self.generator.normal(size=(len(self.packages), 10))  # (names · cells, packages)
        packages = dict(zip(self.names, drawn.reshape(len(self.names), len(self.cells), 10), strict=True))
        of_parent = self.generator.normal(size=(3, len(self.cells)))
        self.values: dict[tuple[str, str, int], NDArray[np.float64]] = {}
        for label, name in self.of_main.items():
            of_seed = self.generator.normal(size=(self.seeds.get(label, 3), len(self.cells)))
            if label not in self.seeds:
                of_seed = correlation * of_parent + math.sqrt(1 - correlation**2) * of_seed
            stage = float(label in STAGES)
            far = own * stage + (own - scratch) * (label in self.seeds)
            mean = (far, gain * stage, 0.0, loss * (1 + short * stage))
            effects = (of_parent if label == "parent" else of_seed) @ self.roots[name]
            for i, cell in enumerate(self.cells):
                self.values[label, *cell] = mean[i] + effects[:, i, None] + packages[name][i]

    def losses(self, strategy: str, protocol: str, length: int) -> Value:
        """See `Tier.losses`."""
        values = self.values[strategy, protocol, length]
        return Value(pd.Series(values.mean(1)), "", (values, np.ones_like(values)))

    def answers(self) -> pd.DataFrame:
        """Return `stage_answers` of the runs."""
        of_parents = copy(self)
        of_parents.samples = "parents"
        return stage_answers(of_parents, self)


def _root(covariance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the symmetric square root of a covariance matrix."""
    values, vectors = np.linalg.eigh(covariance)
    return np.asarray(vectors * np.sqrt(values.clip(min=0)) @ vectors.T)


def error_rates(root: Path, times: int = 300) -> str:
    """Return a Markdown table with the fraction of each answer for several truths, which are those of all stages."""
    runs = SimulatedStages(Tier(root, "main", ["main"], 128, "planned in results/PLAN.md"))
    truths = {  # arguments of `SimulatedStages.draw` without the correlation
        "own loss −1.6, gain 0.08, loss at 128 +2%, from scratch +0.1": (-1.6, 0.08, 0.02, 0.1),
        "own loss −1.6, gain 0, loss at 128 +0.5%, from scratch +0.05": (-1.6, 0.0, 0.005, 0.05),
        "own loss −0.2, gain 0.05, loss at 128 −0.5%, from scratch 0": (-0.2, 0.05, -0.005, 0.0),
        "own loss 0, gain 0.08, loss at 128 0%, from scratch 0": (0.0, 0.08, 0.0, 0.0),
    }
    lines = [f"| truth | correlation | {' | '.join(ANSWERS)} | D4 |", f"|{' --- |' * (3 + len(ANSWERS))}"]
    for name, truth in truths.items():
        for correlation in (0.0, 0.9):
            counts = {column: Counter[str]() for column in (*ANSWERS, "D4")}
            for _ in range(times):
                runs.draw(*truth, correlation)
                table = runs.answers()
                for column in ANSWERS:
                    counts[column].update(table[column][table[column] != "not tested"])
                counts["D4"][conclusion(table).partition(" (")[0]] += 1
            shown = [
                ", ".join(f"{answer} {number / of.total():.1%}" for answer, number in of.most_common())
                for of in counts.values()
            ]
            lines.append(f"| {name} | {correlation:g} | {' | '.join(shown)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(error_rates(Path(sys.argv[1])) if sys.argv[2:] == ["errors"] else answers(Path(sys.argv[1])))
