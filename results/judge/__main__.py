"""`python -m results.judge results`: judge the field's claims by the committed numbers, and write CLAIMS.md.

Every verdict is computed, at each tier of comparisons: *reproduced* if all a claim says is shown to hold,
*contradicted* if some of it is shown not to, *not resolved* if the spread over seeds and text is too wide to tell,
*not tested* if the numbers are not there.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from results.judge.evidence import Tier, Untested
from results.judge.statements import MOST_SEEDS, POWER, Part, parts, refuting, verdict

TABLE = yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text())
VERDICTS = ("reproduced", "contradicted", "not resolved", "not tested")


@dataclass(frozen=True)
class Finding:
    """What became of a claim at a tier.

    Args:
        verdict: One of `VERDICTS`.
        parts: What it rests on, by statement.
        missing: Why it, or some of it, is not tested.
    """

    verdict: str
    parts: dict[str, list[Part]]
    missing: str = ""

    @property
    def all_parts(self) -> list[Part]:
        """Those of all its statements."""
        return [part for of_statement in self.parts.values() for part in of_statement]

    @property
    def seeds(self) -> int:
        """The fewest behind any part on which the verdict rests: one that fails is enough to contradict."""
        resting = refuting(self.all_parts) if self.verdict == "contradicted" else self.all_parts
        return min((part.found.seeds for part in resting), default=0)

    @property
    def wanted(self) -> str:
        """For a claim that is not resolved: what these seeds could have shown, and how many it takes."""
        open_parts = [part for part in self.all_parts if not part.shows]
        if self.verdict != "not resolved" or not open_parts:
            return ""
        if self.seeds < 2:
            return "one seed: what another would give is not known"
        against = [part for part in open_parts if not part.agrees]
        # one part that fails is enough to contradict, if it stands out among all; to reproduce, all have to hold
        among = len(self.all_parts) if against else 1
        wanted = [(part.needed(among) or MOST_SEEDS + 1, part) for part in against or open_parts]
        seeds, part = (min if against else max)(wanted, key=lambda pair: pair[0])
        effect = part.effect(part.found.seeds, among)
        size = f"{effect:.2g}" if part.linear else f"{float(f'{100 * math.expm1(effect):.2g}'):g}%"
        takes = f"{seeds} seeds" if seeds <= MOST_SEEDS else f"more than {MOST_SEEDS} seeds, or more text"
        side = "contradict" if against else "reproduce"
        return f"{part.found.seeds} seeds show {size} from the bound; to {side} by what was found takes {takes}"


def judge(claim: dict[str, Any], tier: Tier) -> Finding:
    """Judge a claim of the table by the numbers of a tier. Some of them can contradict it, only all reproduce it."""
    for statement in claim.get("given", []):
        try:
            given = parts(statement, tier, TABLE["tie"])
        except Untested as reason:
            return Finding("not tested", {}, str(reason))
        if not all(part.shows for part in given):
            return Finding("not tested", {}, f"`{statement}` is not shown: {', '.join(map(str, given))}")
    found, reasons = {}, []
    for statement in claim["holds"]:
        try:
            found[statement] = parts(statement, tier, TABLE["tie"])
        except Untested as reason:
            reasons.append(str(reason))
    missing = "; ".join(dict.fromkeys(reasons))
    answer = verdict([part for of_statement in found.values() for part in of_statement]) if found else "not tested"
    if missing and answer != "contradicted":
        return Finding("not tested", {}, missing)
    return Finding(answer, found, missing)


def tiers(root: Path) -> dict[str, Tier]:
    """The tiers of the table, with their results below a folder."""
    return {name: Tier(root, name, **about) for name, about in TABLE["tiers"].items()}


def judge_all(root: Path) -> dict[str, dict[str, Finding]]:
    """Number of the claim -> tier -> finding, for each tier that is committed and that the claim is about."""
    known = tiers(root)
    return {
        number: {
            name: judge(claim, tier)
            for name, tier in known.items()
            if tier.there and name in claim.get("at", TABLE["usual"])
        }
        for number, claim in TABLE["claims"].items()
    }


def better(findings: dict[str, Finding]) -> str | None:
    """The tier that is the better test: the last of the table that tested it with two seeds or more, else with one."""
    tested = [name for name, finding in findings.items() if finding.verdict != "not tested"]
    several = [name for name in tested if findings[name].seeds > 1]
    return (several or tested or [None])[-1]


def markdown(root: Path) -> str:
    """CLAIMS.md: a row for each claim, and below it what each verdict rests on."""
    known = {name: tier for name, tier in tiers(root).items() if tier.there}
    findings = judge_all(root)
    chosen = {number: better(of_claim) for number, of_claim in findings.items()}
    final = {n: findings[n][tier].verdict if tier else "not tested" for n, tier in chosen.items()}
    counts = ", ".join(f"{list(final.values()).count(verdict)} {verdict}" for verdict in VERDICTS)
    lines = [
        "# Claims, and what the committed numbers say of them",
        "",
        "Written by `python -m results.judge results` from [judge/claims.yaml](judge/claims.yaml) and the numbers",
        "beside this file; a test computes it again. All networks are small (1.3M parameters, trained on source code;",
        "tasks: 0.1M): a contradicted claim is contradicted here, not for the models it was made of.",
        "",
        *(f"- **{name}**: trained at {tier.trained} {tier.unit}, {tier.what}" for name, tier in known.items()),
        "",
        "A claim is reproduced if each of its parts is shown to hold by a one-sided t-test at 2.5% over paired seeds",
        "(and over text, where the runs' sums by block are kept), contradicted if one is shown not to, corrected for",
        "the number of its parts (Bonferroni) and for nothing else. One seed resolves nothing. What so many seeds",
        f"show, and how many it takes, is said for a test that shows it {POWER:.0%} of the time. In brackets: 95%",
        "intervals.",
        f"`tie` is {TABLE['tie']}, 1x the training length.",
        "",
        f"By the better test of each: {counts}.",
        "",
        f"| | claim | source | {' | '.join(known)} | better test |",
        f"| --- | --- | --- | {' | '.join('---' for _ in known)} | --- |",
    ]
    for number, claim in TABLE["claims"].items():
        cells = [_cell(findings[number].get(name), name == chosen[number], _end(claim, known[name])) for name in known]
        test = f"{chosen[number]}: {_why(findings[number], chosen[number], known)}" if chosen[number] else "–"
        lines.append(f"| {' | '.join([number, claim['claim'], claim['source'], *cells, test])} |")
    lines += ["", "## What each verdict rests on", ""]
    for number, claim in TABLE["claims"].items():
        lines.append(f"**{number}** {claim['claim']} ({claim['source']}). Holds if {_holds(claim)}.")
        lines += ["", *(f"- {name}: {_rests(finding)}" for name, finding in findings[number].items()), ""]
    return "\n".join(lines)


def _cell(finding: Finding | None, chosen: bool, end: str) -> str:
    if finding is None:
        return "–"
    said = finding.verdict + (end if finding.verdict == "reproduced" else "")
    seeds = f", {finding.seeds} seed{'s' * (finding.seeds > 1)}" if finding.seeds else ""
    return f"**{said}**{seeds}" if chosen else f"{said}{seeds}"


def _end(claim: dict[str, Any], tier: Tier) -> str:
    """Where a tier's lengths end, if that is before those that the claim names."""
    last = max(tier.lengths, default=0) // tier.trained
    return f" to {last}×" if last < claim.get("to", 0) else ""


def _why(findings: dict[str, Finding], chosen: str, known: dict[str, Tier]) -> str:
    later = [n for n, finding in findings.items() if list(known).index(n) > list(known).index(chosen)]
    single = [name for name in later if findings[name].seeds == 1]
    return known[chosen].why + (f"; {', '.join(single)} has one seed" if single else "")


def _holds(claim: dict[str, Any]) -> str:
    given = "".join(f", given `{statement}`" for statement in claim.get("given", []))
    return " and ".join(f"`{statement}`" for statement in claim["holds"]) + given


def _rests(finding: Finding) -> str:
    if not finding.parts:
        return f"{finding.verdict}: {finding.missing}"
    # both sides of a ± are about one number
    numbers = [dict.fromkeys(map(str, found)) for found in finding.parts.values()]
    shown = dict.fromkeys(path for found in finding.parts.values() for part in found for path in part.shown)
    links = ", ".join(f"[{path}]({path})" for path in shown)
    wanted = f" ({finding.wanted})" if finding.wanted else ""
    missing = f" (not tested: {finding.missing})" if finding.missing else ""
    return f"{finding.verdict}{wanted}: {'; '.join(', '.join(number) for number in numbers)}{missing}; {links}"


def main(arguments: list[str]) -> None:
    """Write CLAIMS.md into the folder of results given, ``results`` if none is.

    Raises:
        ValueError: If there is no such folder.
    """
    root = Path(arguments[0] if arguments else "results")
    if not root.is_dir():
        raise ValueError(f"results: got {root}, expected the folder that holds the comparisons' reports")
    text = markdown(root)
    (root / "CLAIMS.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
