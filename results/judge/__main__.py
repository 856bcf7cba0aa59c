"""`python -m results.judge results`: test published claims on the committed results, and write two pages.

CLAIMS.md has the verdict on each claim in each tier of comparisons: *reproduced* if every part of the claim is shown to
hold, *contradicted* if a part is shown not to hold, *not resolved* if neither is shown, and *not tested* if results are
missing. README.md is findings.md with its numbers filled in.
"""

import math
import re
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from scipy import stats

from kerple.compare.run_folders import recorded_runs
from results.judge import questions
from results.judge.evidence import PLANNED, Tier, Untested
from results.judge.statements import ALPHA, Part, chances, combined, parts, verdict

HERE = Path(__file__).parent
TABLE = yaml.safe_load((HERE / "claims.yaml").read_text())
VERDICTS = ("reproduced", "contradicted", "not resolved", "not tested")
SLOT = re.compile(r"\{(?P<tier>[\w-]+), (?P<shown>%|nats): (?P<expression>[^}]+)\}")


@dataclass(frozen=True)
class Finding:
    """The verdict on a claim in a tier.

    Args:
        verdict: One of `VERDICTS`.
        parts: The tested parts by statement.
        missing: Why the claim, or a statement of it, is not tested.
    """

    verdict: str
    parts: dict[str, list[Part]]
    missing: str = ""

    @property
    def all_parts(self) -> list[Part]:
        """The parts of all statements."""
        return [part for of_statement in self.parts.values() for part in of_statement]

    @property
    def seeds(self) -> int:
        """The smallest number of seeds of a part."""
        return min((part.number.estimate.seeds for part in self.all_parts), default=0)

    @property
    def p(self) -> float:
        """Two-sided p-value of the verdict."""
        return min(1.0, 2 * min(chances(self.all_parts)))


def judge(claim: dict[str, Any], tier: Tier) -> Finding:
    """Judge a claim by the results of a tier.

    A part of the results can contradict a claim. Only a test of all its statements can reproduce it.
    """
    for statement in claim.get("given", []):
        try:
            given = parts(statement, tier, TABLE["tie"])
        except Untested as reason:
            return Finding("not tested", {}, str(reason))
        if verdict(given) != "reproduced":
            return Finding("not tested", {}, f"`{statement}` is not shown: {', '.join(map(str, given))}")
    by_statement, reasons = {}, []
    for statement in claim["holds"]:
        try:
            by_statement[statement] = parts(statement, tier, TABLE["tie"])
        except Untested as reason:
            reasons.append(str(reason))
    missing = "; ".join(dict.fromkeys(reasons))
    of_claim = [part for of_statement in by_statement.values() for part in of_statement]
    answer = verdict(of_claim) if of_claim else "not tested"
    if missing and answer != "contradicted":
        return Finding("not tested", {}, missing)
    return Finding(answer, by_statement, missing)


@cache
def tiers(root: Path) -> dict[str, Tier]:
    """The tiers of claims.yaml, with their results in a folder."""
    return {name: Tier(root, name, **about) for name, about in TABLE["tiers"].items()}


def judge_all(root: Path) -> dict[str, dict[str, Finding]]:
    """Number of the claim -> tier -> finding, for each tier with results that the claim names."""
    known = {name: tier for name, tier in tiers(root).items() if tier.has_results}
    return {
        number: {name: judge(claim, tier) for name, tier in known.items() if name in claim.get("at", TABLE["usual"])}
        for number, claim in TABLE["claims"].items()
        if "holds" in claim
    }


def deciding(claim: dict[str, Any], findings: dict[str, Finding]) -> str | None:
    """The tier whose verdict counts: the first in ``decided_by`` in which the claim was tested."""
    tested = [name for name, finding in findings.items() if finding.verdict != "not tested"]
    return next((name for name in claim["decided_by"] if name in tested), None)


def markdown(root: Path) -> str:
    """CLAIMS.md: a table with a row for each claim, and the numbers behind each verdict."""
    known = {name: tier for name, tier in tiers(root).items() if tier.has_results}
    findings, claims = judge_all(root), TABLE["claims"]
    chosen = {number: tier for number, of in findings.items() if (tier := deciding(claims[number], of))}
    final = {number: findings[number][tier] for number, tier in chosen.items()}
    judged = [number for number, finding in final.items() if finding.verdict in VERDICTS[:2]]
    adjusted = dict(zip(final, stats.false_discovery_control([finding.p for finding in final.values()]), strict=True))
    passing = [number for number in judged if adjusted[number] < ALPHA]
    counts = Counter(finding.verdict for finding in final.values())
    counts["not tested"] = len(claims) - len(final)
    head = (
        (HERE / "claims.md")
        .read_text()
        .format(
            changed="\n".join(
                f"- **{number}** was {about['changed']}" for number, about in claims.items() if "changed" in about
            ),
            gone=", ".join(f"{number} ({about['gone']})" for number, about in claims.items() if "gone" in about),
            counts=", ".join(f"{counts[name]} {name}" for name in VERDICTS),
            judged=len(judged),
            passing=len(passing),
            own=", ".join(number for number in judged if "our_bound" in claims[number]),
            tested=len(final),
            tiers="\n".join(
                f"- **{name}**: trained at {of.trained} {of.unit}, {of.what}" for name, of in known.items()
            ),
            tie=TABLE["tie"],
        )
    )
    lines = [
        f"{head}| | claim | source | {' | '.join(known)} | decided by | p, adjusted |",
        f"| --- | --- | --- | {' | '.join('---' for _ in known)} | --- | --- |",
    ]
    for number, of_claim in findings.items():
        claim, tier = claims[number], chosen.get(number)
        cells = [_cell(of_claim.get(name), name == tier, _limit(claim, known[name]), known[name]) for name in known]
        until = " until main" if "main" in claim["decided_by"] else " °" * (tier in TABLE["usual"])
        decided = f"{tier}{until * (tier != 'main')}" if tier else "–"
        p = f"{adjusted[number]:.2g}{' ‡' * (number in judged and number not in passing)}" if tier else "–"
        about = claim["claim"] + " \\*" * ("our_bound" in claim) + " ◊" * ("looked_at" in claim)
        lines.append(f"| {' | '.join([number, about, claim['source'], *cells, decided, p])} |")
    lines += ["", "## Numbers behind each verdict", ""]
    for number, of_claim in findings.items():
        claim = claims[number]
        notes = [f"Looked at before: {claim['looked_at']}."] if "looked_at" in claim else []
        notes += [f"Bound of ours: {claim['our_bound']}."] if "our_bound" in claim else []
        about = " ".join([f"{claim['claim']} ({claim['source']}).", f"Holds if {_condition(claim)}.", *notes])
        lines += [
            f"**{number}** {about}",
            "",
            *(f"- {name}: {_evidence(finding)}" for name, finding in of_claim.items()),
            "",
        ]
    return "\n".join(lines)


def _cell(finding: Finding | None, chosen: bool, end: str, tier: Tier) -> str:
    if finding is None:
        return "–"
    said = finding.verdict + (end if finding.verdict == "reproduced" else "")
    sample = tier.samples.removesuffix("s") + "s" * (finding.seeds > 1)
    seeds = f", {finding.seeds} {sample}" if finding.seeds else ""
    return f"**{said}**{seeds}" if chosen else f"{said}{seeds}"


def _limit(claim: dict[str, Any], tier: Tier) -> str:
    """The longest length of a tier, if the claim names a longer one."""
    last = max(tier.lengths, default=0) // tier.trained
    return f" to {last}×" if last < claim.get("to", 0) else ""


def _condition(claim: dict[str, Any]) -> str:
    given = "".join(f", given `{statement}`" for statement in claim.get("given", []))
    return " and ".join(f"`{statement}`" for statement in claim["holds"]) + given


def _evidence(finding: Finding) -> str:
    if not finding.parts:
        return f"{finding.verdict}: {finding.missing}"
    # the two sides of a ± have the same number
    numbers = [dict.fromkeys(map(str, of_statement)) for of_statement in finding.parts.values()]
    shown = dict.fromkeys(path for part in finding.all_parts for path in part.number.shown)
    links = ", ".join(f"[{path}]({path})" for path in shown)
    missing = f" (not tested: {finding.missing})" if finding.missing else ""
    return f"{finding.verdict}: {'; '.join(', '.join(number) for number in numbers)}{missing}; {links}"


def findings_page(root: Path) -> str:
    """README.md: findings.md, with each number and its interval computed from the committed runs."""
    known = tiers(root)

    def number(slot: re.Match[str]) -> str:
        estimate = combined(slot["expression"], known[slot["tier"]]).estimate
        middle, low, high = estimate.mean, *estimate.interval()
        if slot["shown"] == "nats":
            return f"{middle:+.4f} [{low:+.4f}, {high:+.4f}]".replace("-", "−")
        middle, low, high = (100 * math.expm1(value) for value in (middle, low, high))
        return f"{middle:+.1f}% [{low:+.1f}, {high:+.1f}]".replace("-", "−")

    text = (HERE / "findings.md").read_text().replace("{missing}", missing_runs(root))
    return SLOT.sub(number, text.replace("{questions}", questions.table(known["main"])))


def missing_runs(root: Path) -> str:
    """A sentence on how many planned runs are finished, and which are missing."""
    finished, planned, missing = 0, 0, []
    for name in PLANNED:
        plan = yaml.safe_load((HERE.parents[1] / f"configs/compare/{name}.yaml").read_text())
        recorded = {(run.strategy, run.seed) for run in recorded_runs(root / name)}
        for strategy, about in plan["strategies"].items():
            seeds = plan["seeds"][: about.get("seeds", len(plan["seeds"]))]
            absent = [seed for seed in seeds if (strategy, seed) not in recorded]
            finished, planned = finished + len(seeds) - len(absent), planned + len(seeds)
            if absent:
                whole = len(absent) == len(seeds) > 1
                named = f"{seeds[0]} to {seeds[-1]}" if whole else ", ".join(map(str, absent))
                missing.append(f"{strategy}{' on rfc' * (name != 'main')} {named}")
    rest = f" Missing are {'; '.join(missing)}." if missing else ""
    read = f"Of the {planned} runs of [PLAN.md](PLAN.md), {finished} are finished."
    return f"{read} Their results are not analysed before all runs of a comparison are finished.{rest}"


def main(arguments: list[str]) -> None:
    """Write CLAIMS.md and README.md to a folder of results, by default ``results``.

    Raises:
        ValueError: If the folder does not exist.
    """
    root = Path(arguments[0] if arguments else "results")
    if not root.is_dir():
        raise ValueError(f"results: got {root}, expected the folder that holds the comparisons' reports")
    (root / "CLAIMS.md").write_text(page := markdown(root))
    (root / "README.md").write_text(findings_page(root))
    print(page)


if __name__ == "__main__":
    main(sys.argv[1:])
