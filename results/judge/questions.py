"""The four questions of PLAN.md as statements, and the rule by which they are answered.

Each statement says that an effect is above 0, and has an effect of interest. The answer to a question is

- *yes* if each statement is significant in a one-sided test at 2.5%, and the largest of their p-values passes Benjamini
  and Hochberg at 5% over the four questions,
- else *no* if an effect is significantly below its effect of interest, in a one-sided test at 2.5% with Bonferroni's
  correction for the number of statements,
- else *inconclusive*.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from scipy import stats

from results.judge.evidence import Untested
from results.judge.statements import ALPHA, Part, chances, parts

# question -> statement -> effect of interest in nats; a perplexity that is lower by 5% is .051 nats
FIVE_PERCENT = -math.log(0.95)
GAIN = "none:{0}[{1}] / own:{0}[{1}]"
QUESTIONS = {
    "1. Does text beyond one segment of the training length help KERPLE-log at 8×?": {
        f"{GAIN.format('KerpleLog', '8x')} > 1": 0.02,
        "foreign:KerpleLog[8x] / own:KerpleLog[8x] > 1": 0.02,
    },
    "2. Has RNoPE-SWA a lower loss at 16× than KERPLE-log, and a lower gain from distant text?": {
        "KerpleLog[16x] / RNoPE-SWA[16x] > 1": FIVE_PERCENT,
        f"{GAIN.format('KerpleLog', '16x')} * own:RNoPE-SWA[16x] / none:RNoPE-SWA[16x] > 1": 0.02,
    },
    "3. Is KERPLE-log ahead of ALiBi at 16×?": {"ALiBi[16x] / KerpleLog[16x] > 1": FIVE_PERCENT},
    "4. Does KERPLE-power gain more from distant text than KERPLE-log at 8×?": {
        f"{GAIN.format('KerplePower', '8x')} * own:KerpleLog[8x] / none:KerpleLog[8x] > 1": 0.02
    },
}


@dataclass(frozen=True)
class Answer:
    """The answer to a question.

    Args:
        answer: yes, no, inconclusive or not tested.
        p: One-sided p-value of yes.
        below: One-sided p-value of no.
        adjusted: p-value of yes after Benjamini and Hochberg over the questions.
        parts: A part for each statement.
        missing: Why the question is not tested.
    """

    answer: str
    p: float
    below: float
    adjusted: float
    parts: list[Part]
    missing: str = ""


def answers(tier: Any, questions: Mapping[str, Mapping[str, float]] = QUESTIONS) -> dict[str, Answer]:
    """Answer each question by the runs of a tier.

    Args:
        tier: The tier.
        questions: The effect of interest of each statement, in nats, by question and statement.
    """
    found, missing = {}, {}
    for question, statements in questions.items():
        try:
            found[question] = [part for statement in statements for part in parts(statement, tier, 1.0)]
        except Untested as reason:
            missing[question] = str(reason)
    p = {question: chances(of)[0] for question, of in found.items()}
    adjusted = dict(zip(questions, stats.false_discovery_control([p.get(q, 1.0) for q in questions]), strict=True))
    answered = {}
    for question, statements in questions.items():
        if question in missing:
            answered[question] = Answer("not tested", 1.0, 1.0, 1.0, [], missing[question])
            continue
        effects = zip(found[question], statements.values(), strict=True)
        below = chances([replace(part, bound=effect) for part, effect in effects])[1]
        shown = p[question] < ALPHA / 2 and adjusted[question] < ALPHA
        answer = "yes" if shown else "no" if below < ALPHA / 2 else "inconclusive"
        answered[question] = Answer(answer, p[question], below, adjusted[question], found[question])
    return answered
