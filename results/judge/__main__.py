"""`python -m results.judge results`: test published claims on the committed results, and write pages and a figure.

CLAIMS.md has the verdict on each claim in each tier, a group of comparisons. A claim is

- *reproduced* if every part of it is shown to hold,
- *contradicted* if a part is shown not to hold,
- *not resolved* if neither is shown,
- *not tested* if results are missing.

README.md is findings.md with numbers in place of its expressions. main/dilution.png is its figure.
extend-by-training/answers.md has the answer to the question D4.
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

from results.judge import dilution, extension, questions
from results.judge.evidence import Tier, Untested, flattest_heads
from results.judge.figure import draw_dilution
from results.judge.plan import progress
from results.judge.statements import ALPHA, Part, chances, correlation, evaluate, parts, verdict, with_interval

HERE = Path(__file__).parent
TABLE = yaml.safe_load((HERE / "claims.yaml").read_text())
VERDICTS = ("reproduced", "contradicted", "not resolved", "not tested")
SLOT = re.compile(r"\{(?P<tier>[\w-]+), (?P<shown>%|nats): (?P<expression>[^}]+)\}")


@dataclass(frozen=True)
class Finding:
    """The verdict on a claim in a tier."""

    verdict: str  # one of `VERDICTS`
    parts: dict[str, list[Part]]  # the tested parts by statement
    missing: str = ""  # reason why the claim, or a statement of it, is not tested

    @property
    def all_parts(self) -> list[Part]:
        """The parts of all statements."""
        return [part for of_statement in self.parts.values() for part in of_statement]

    @property
    def seeds(self) -> int:
        """The smallest number of seeds of a part; 0 without parts."""
        return min((part.number.estimate.seeds for part in self.all_parts), default=0)

    @property
    def p(self) -> float:
        """Two-sided p-value of the verdict."""
        return min(1.0, 2 * min(chances(self.all_parts)))


def judge(claim: dict[str, Any], tier: Tier) -> Finding:
    """Judge a claim, an entry of ``claims`` in claims.yaml, by the results of a tier.

    One tested statement can contradict a claim. A claim is reproduced only if all its statements are tested.
    """
    for statement in claim.get("given", []):
        try:
            condition = parts(statement, tier, TABLE["tie"])
        except Untested as reason:
            return Finding("not tested", {}, str(reason))
        if verdict(condition) != "reproduced":
            return Finding("not tested", {}, f"`{statement}` is not shown: {', '.join(map(str, condition))}")
    by_statement = {}
    reasons = []
    for statement in claim["holds"]:
        try:
            by_statement[statement] = parts(statement, tier, TABLE["tie"])
        except Untested as reason:
            reasons.append(str(reason))
    missing = "; ".join(dict.fromkeys(reasons))
    all_parts = [part for of_statement in by_statement.values() for part in of_statement]
    found = verdict(all_parts) if all_parts else "not tested"
    if missing and found != "contradicted":
        return Finding("not tested", {}, missing)
    return Finding(found, by_statement, missing)


@cache
def tiers(root: Path) -> dict[str, Tier]:
    """Return the tiers of claims.yaml by name, with the results in a folder."""
    return {name: Tier(root, name, **about) for name, about in TABLE["tiers"].items()}


def judge_all(root: Path) -> dict[str, dict[str, Finding]]:
    """Return the finding by number of the claim and name of the tier, for each tier of the claim that has results."""
    known = {name: tier for name, tier in tiers(root).items() if tier.has_results}
    return {
        number: {name: judge(claim, tier) for name, tier in known.items() if name in claim.get("at", TABLE["usual"])}
        for number, claim in TABLE["claims"].items()
        if "holds" in claim
    }


def deciding(claim: dict[str, Any], findings: dict[str, Finding]) -> str | None:
    """Return the tier whose verdict counts: the first in ``decided_by`` with a test of the claim, or None."""
    tested = [name for name, finding in findings.items() if finding.verdict != "not tested"]
    return next((name for name in claim["decided_by"] if name in tested), None)


def markdown(root: Path) -> str:
    """Return the content of CLAIMS.md: a table with a row for each claim, and the numbers behind each verdict."""
    known = {name: tier for name, tier in tiers(root).items() if tier.has_results}
    findings = judge_all(root)
    claims = TABLE["claims"]
    tier_of = {number: tier for number, of in findings.items() if (tier := deciding(claims[number], of))}
    tested = {number: findings[number][tier] for number, tier in tier_of.items()}
    decided = [number for number, finding in tested.items() if finding.verdict in ("reproduced", "contradicted")]
    adjusted = dict(zip(tested, stats.false_discovery_control([finding.p for finding in tested.values()]), strict=True))
    passing = [number for number in decided if adjusted[number] < ALPHA]
    counts = Counter(finding.verdict for finding in tested.values())
    counts["not tested"] = len(claims) - len(tested)
    changed = [f"- **{number}** was {about['changed']}" for number, about in claims.items() if "changed" in about]
    head = (HERE / "claims.md").read_text()
    head = head.format(
        changed="\n".join(changed),
        gone=", ".join(f"{number} ({about['gone']})" for number, about in claims.items() if "gone" in about),
        counts=", ".join(f"{counts[name]} {name}" for name in VERDICTS),
        judged=len(decided),
        passing=len(passing),
        own=", ".join(number for number in decided if "our_bound" in claims[number]),
        tested=len(tested),
        tiers="\n".join(f"- **{name}**: trained at {of.trained} {of.unit}, {of.what}" for name, of in known.items()),
        tie=TABLE["tie"],
    )
    table = [
        f"{head}| | claim | source | {' | '.join(known)} | decided by | p, adjusted |",
        f"| --- | --- | --- | {' | '.join('---' for _ in known)} | --- | --- |",
    ]
    numbers = ["", "## Numbers behind each verdict", ""]
    for number, of_claim in findings.items():
        claim = claims[number]
        tier = tier_of.get(number)
        cells = [_cell(of_claim.get(name), name == tier, claim, known[name]) for name in known]
        mark = " °" * (tier in TABLE["usual"] and tier != "main")  # main does not have the claim's strategies
        by = f"{tier}{mark}" if tier else "–"
        p = f"{adjusted[number]:.2g}{' ‡' * (number in decided and number not in passing)}" if tier else "–"
        about = claim["claim"] + " \\*" * ("our_bound" in claim) + " ◊" * ("looked_at" in claim)
        table.append(f"| {' | '.join([number, about, claim['source'], *cells, by, p])} |")
        notes = [f"Changed after the results were known: {claim['looked_at']}."] if "looked_at" in claim else []
        notes += [f"Our own bound: {claim['our_bound']}."] if "our_bound" in claim else []
        notes += [f"Note: {claim['note']}."] if "note" in claim else []
        holds = " and ".join(f"`{statement}`" for statement in claim["holds"])
        given = "".join(f", given `{statement}`" for statement in claim.get("given", []))
        about = " ".join([f"{claim['claim']} ({claim['source']}).", f"Holds if {holds}{given}.", *notes])
        evidence = [f"- {name}: {_evidence(finding)}" for name, finding in of_claim.items()]
        numbers += [f"**{number}** {about}", "", *evidence, ""]
    return "\n".join([*table, *numbers])


def _cell(finding: Finding | None, decides: bool, claim: dict[str, Any], tier: Tier) -> str:
    """The verdict and the number of seeds for the table of CLAIMS.md. The verdict of the deciding tier is bold.

    If a reproduced claim is about a longer length than all of the tier, the verdict is such as "reproduced to 16×".
    """
    if finding is None:
        return "–"
    longest = max(tier.lengths, default=0) // tier.trained
    text = finding.verdict + f" to {longest}×" * (finding.verdict == "reproduced" and longest < claim.get("to", 0))
    seeds = f", {finding.seeds} {tier.samples.removesuffix('s')}{'s' * (finding.seeds > 1)}" if finding.seeds else ""
    return f"**{text}**{seeds}" if decides else f"{text}{seeds}"


def _evidence(finding: Finding) -> str:
    """The verdict, its numbers, and links to the pages that show them."""
    if not finding.parts:
        return f"{finding.verdict}: {finding.missing}"
    # the two parts of a statement with ± have the same number
    numbers = [dict.fromkeys(map(str, of_statement)) for of_statement in finding.parts.values()]
    pages = dict.fromkeys(page for part in finding.all_parts for page in part.number.pages)
    links = ", ".join(f"[{page}]({page})" for page in pages)
    missing = f" (not tested: {finding.missing})" if finding.missing else ""
    return f"{finding.verdict}: {'; '.join(', '.join(number) for number in numbers)}{missing}; {links}"


def findings_page(root: Path) -> str:
    """Return the content of README.md: findings.md, with the answers, and each number with its interval, filled in."""
    # the runs on RFCs are no tier of claims.yaml, because no claim is tested on them
    known = {**tiers(root), "main-rfc": Tier(root, "main-rfc", ["main-rfc"], 128, "on the corpus `rfc`")}
    known[extension.COMPARISON], with_main = extension.tiers(root)

    def number(slot: re.Match[str]) -> str:
        estimate = evaluate(slot["expression"], known[slot["tier"]]).estimate
        values = estimate.mean, *estimate.interval()
        if slot["shown"] == "nats":
            return with_interval(*values)
        return "{:+.1f}% [{:+.1f}, {:+.1f}]".format(*(100 * math.expm1(v) for v in values)).replace("-", "−")

    found = correlation(*flattest_heads(known["main"], "KerpleLog"))
    r, low, high = (f"{value:+.2f}".replace("-", "−") for value in found)
    text = (HERE / "findings.md").read_text().replace("{missing}", progress(root))
    text = text.replace("{flattest head}", f"{r} [{low}, {high}]")
    for question in dilution.QUESTIONS:
        text = text.replace(f"{{answer {question}}}", dilution.answer_to(root, question))
    answer = extension.conclusion(extension.stage_answers(known[extension.COMPARISON], with_main))
    text = text.replace("{answer D4}", f"{answer[0].upper()}{answer[1:]}.")
    for index, of in enumerate(questions.answers(known["main"]).values(), start=1):
        p = of.below if of.answer == "no" else of.adjusted
        text = text.replace(f"{{answer {index}}}", f"{of.answer.capitalize()}{f' (p = {p:.2g})' * bool(of.parts)}.")
    return SLOT.sub(number, text)


def main(arguments: list[str]) -> None:
    """Write the pages and the figure to a folder of results, and print CLAIMS.md. The default folder is ``results``.

    Raises:
        ValueError: If the folder does not exist.
    """
    root = Path(arguments[0] if arguments else "results")
    if not root.is_dir():
        raise ValueError(f"results: got {root}, expected the folder of the comparisons' reports, such as results")
    (root / "CLAIMS.md").write_text(page := markdown(root))
    (root / "README.md").write_text(findings_page(root))
    (root / extension.COMPARISON / "answers.md").write_text(extension.page(root))
    draw_dilution(tiers(root)["main"], root / "main/dilution.png")
    print(page)


if __name__ == "__main__":
    main(sys.argv[1:])
