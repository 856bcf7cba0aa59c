"""`python -m results.judge results`: judge the field's claims by the committed CSVs, and write CLAIMS.md.

Every verdict is computed: *reproduced* if all a claim says holds beyond the spread over seeds, *contradicted* if some
of it is wrong beyond that spread, *not resolved* if the spread is too wide to tell, *not tested* if the numbers are
not there.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from results.judge import rules
from results.judge.evidence import Answer, Evidence, Part, Untested

Rule = Callable[[Evidence], tuple[Part, str, str]]


@dataclass(frozen=True)
class Claim:
    """A statement of the literature, and how it is judged here.

    Args:
        number: C1 to C24.
        text: The claim.
        source: Who makes it.
        rule: From the evidence: what it says, what was found, and the file that shows it. Its docstring says how.
    """

    number: str
    text: str
    source: str
    rule: Rule

    @property
    def how(self) -> str:
        """How the claim is tested."""
        return inspect.getdoc(self.rule) or ""


@dataclass(frozen=True)
class Finding:
    """What became of a claim."""

    claim: Claim
    verdict: str
    found: str
    shown: str


CLAIMS = [
    Claim("C1", "KERPLE-log's perplexity at 2× to 32× is no higher than at the training length", "KERPLE T3", rules.c1),
    Claim("C2", "log is at or below power at every length beyond training", "KERPLE T3", rules.c2),
    Claim("C3", "log beats ALiBi at every length beyond training, significantly", "KERPLE T3", rules.c3),
    Claim("C4", "T5 is slightly better than log at 1× and 2×, worse from 8× on", "KERPLE T3", rules.c4),
    Claim("C5", "rotary and sinusoidal collapse: more than doubled by 4×", "KERPLE T3", rules.c5),
    Claim("C6", "3-para-log is within 1% of log", "KERPLE T5", rules.c6),
    Claim("C7", "bias+wht is slightly worse than log at every length", "KERPLE T5", rules.c7),
    Claim("C8", "additive Gaussians explode beyond 2×, 2-para-wht stays flat", "KERPLE T6", rules.c8),
    Claim("C9", "log's position-wise perplexity keeps falling to 8×", "KERPLE fig. 5", rules.c9),
    Claim("C10", "log is below log windowed at the training length at far positions", "KERPLE fig. 5", rules.c10),
    Claim("C11", "ALiBi is above log-windowed almost everywhere, T5 below it mostly", "KERPLE fig. 5", rules.c11),
    Claim("C12", "ALiBi's and power's kernels turn very negative, log has flat heads", "KERPLE plots", rules.c12),
    Claim("C13", "parameters per layer extrapolate worse than shared ones", "later work", rules.c13),
    Claim("C14", "a log step costs at most 3% more than one without a bias", "KERPLE T4", rules.c14),
    Claim("C15", "ALiBi's non-overlapping curve falls with length, its sliding curve does not", "ALiBi", rules.c15),
    Claim("C16", "order of collapse: sinusoidal, rotary, T5, (never) ALiBi", "ALiBi, lecture", rules.c16),
    Claim("C17", "doubling the training length helps T5 more than the other two", "ALiBi, lecture", rules.c17),
    Claim("C18", "a shifted start hurts learned and sinusoidal models, not relative ones", "lecture", rules.c18),
    Claim("C19", "an absolute model's word-position terms are noise beside the other two", "lecture", rules.c19),
    Claim("C20", "Shaw: clip 0 is far worse, any clip ≥ 2 is as good as any other", "Shaw", rules.c20),
    Claim("C21", "NoPE is close at the training length, and does not extrapolate as ALiBi", "NoPE, Haviv", rules.c21),
    Claim("C22", "copying beyond training: NoPE, T5, ALiBi, rotary, sinusoidal, in order", "NoPE", rules.c22),
    Claim("C23", "more training tokens worsen extrapolation", "later work", rules.c23),
    Claim("C24", "angles in bf16 hurt rotary at lengths above 256", "inferred from code", rules.c24),
]


def judge(evidence: Evidence) -> list[Finding]:
    """A finding for each claim."""
    findings = []
    for claim in CLAIMS:
        try:
            part, found, shown = claim.rule(evidence)
            findings.append(Finding(claim, part.answer.value, found, shown))
        except Untested as missing:
            findings.append(Finding(claim, "not tested", str(missing), ""))
    return findings


def markdown(findings: list[Finding]) -> str:
    """CLAIMS.md: a row for each claim."""
    counts = {v: sum(f.verdict == v for f in findings) for v in (*(a.value for a in Answer), "not tested")}
    lines = [
        "# Claims, and what the committed numbers say of them",
        "",
        "Written by `python -m results.judge results` from the CSV files beside this file; a test computes",
        "it again. At this size (1.3M parameters, trained at 64 tokens on source code; tasks: 0.1M) a contradicted",
        "claim is contradicted here, not for the models it was made of. Verdicts are by 95% intervals over paired",
        "seeds, as many as the reports say, corrected for the number of parts a claim can fail in; those of C11, C12",
        "and C17, whose parts are counts, by all seeds agreeing, which resolves nothing before there are six of them.",
        f"{100 * rules.TIE:.1f}% counts as equal. 1× is the training length.",
        "",
        ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + ".",
        "",
        "| | claim | source | holds if | verdict | found | shown in |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for f in findings:
        shown = ", ".join(f"[{path}]({path})" for path in f.shown.split(", ")) if f.shown else "–"
        verdict = f.verdict if f.verdict == "not tested" else f"**{f.verdict}**"
        cells = (f.claim.number, f.claim.text, f.claim.source, f.claim.how, verdict, f.found, shown)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """Write CLAIMS.md into the folder of results given, ``results`` if none is.

    Raises:
        ValueError: If there is no such folder.
    """
    root = Path(arguments[0] if arguments else "results")
    if not root.is_dir():
        raise ValueError(f"results: got {root}, expected the folder that holds the comparisons' reports")
    text = markdown(judge(Evidence(root)))
    (root / "CLAIMS.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
