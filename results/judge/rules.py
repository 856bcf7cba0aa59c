"""How each claim is judged. A rule returns (part, what was found, the file that shows it).

Its docstring is what CLAIMS.md prints as the way the claim was tested.
"""

from itertools import pairwise

import numpy as np
import pandas as pd

from results.judge.evidence import (
    Evidence,
    Part,
    Untested,
    above,
    all_seeds,
    at_most,
    every,
    growth,
    percent,
    ratio,
    significantly_below,
    within,
)

Judged = tuple[Part, str, str]
TIE = 0.005  # the paper prints 21.4 where it has 21.35 to 21.45: what it calls equal may differ by as much
FLAT = -4.0  # nats at the longest distance: a key there still has e^-4 of its weight, 2%
DEMO, MORE, SETTINGS = "adamw", "claims", "settings"
TABLE = "table.md"


def c1(e: Evidence) -> Judged:
    """perplexity at each longer length ≤ 1.005 of that at 1×"""
    log = e.values(DEMO, "KerpleLog")
    first, *beyond = sorted(log.columns)
    ratios = {n: ratio(log[n], log[first]) for n in beyond}
    return every(*(at_most(r, 1 + TIE) for r in ratios.values())), _by_length(ratios, first), f"{DEMO}/{TABLE}"


def c2(e: Evidence) -> Judged:
    """perplexity ≤ 1.005 of power's at each length beyond 1×"""
    ratios = _against(e, DEMO, "KerpleLog", "KerplePower", beyond=True)
    found = "log against power: " + _by_length(ratios, _trained(e))
    return every(*(at_most(r, 1 + TIE) for r in ratios.values())), found, f"{DEMO}/{TABLE}"


def c3(e: Evidence) -> Judged:
    """perplexity below ALiBi's at each length beyond 1×, by the paired t-test after Holm"""
    log, alibi = (e.values(DEMO, s).drop(columns=_trained(e)) for s in ("KerpleLog", "ALiBi"))
    found = "log against ALiBi: " + _by_length(_against(e, DEMO, "KerpleLog", "ALiBi", beyond=True), _trained(e))
    return significantly_below(log, alibi), found, f"{DEMO}/{TABLE}"


def c4(e: Evidence) -> Judged:
    """T5's perplexity ≤ log's at 1× and 2×, above it from 8× on"""
    ratios, t = _against(e, DEMO, "T5", "KerpleLog"), _trained(e)
    near = [at_most(ratios[n]) for n in (t, 2 * t) if n in ratios]
    far = [above(r) for n, r in ratios.items() if n >= 8 * t]
    if len(near) < 2 or not far:
        raise Untested(f"{DEMO}/results.csv lacks 1×, 2× or 8× the training length")
    return every(*near, *far), "T5 against log: " + _by_length(ratios, t), f"{DEMO}/{TABLE}"


def c5(e: Evidence) -> Judged:
    """perplexity at 4× more than twice that at 1×, for both"""
    found = {s: _grown(e, DEMO, s, 4) for s in ("RoPE", "Sinusoidal")}
    text = "4× against 1×: " + ", ".join(f"{s} {percent(r)}" for s, r in found.items())
    return every(*(above(r, 2) for r in found.values())), text, f"{DEMO}/{TABLE}"


def c6(e: Evidence) -> Judged:
    """perplexity within 1% of log's at every length"""
    ratios = _against(e, DEMO, "KerpleLog3", "KerpleLog")
    found = "3-para-log against log: " + _by_length(ratios, _trained(e))
    return every(*(within(r, 0.01) for r in ratios.values())), found, f"{DEMO}/{TABLE}"


def c7(e: Evidence) -> Judged:
    """perplexity above log's at every length"""
    ratios = _against(e, MORE, "KerpleBiasWeight", "KerpleLog")
    found = "bias+wht against log: " + _by_length(ratios, _trained(e))
    return every(*(above(r) for r in ratios.values())), found, f"{MORE}/{TABLE}"


def c8(e: Evidence) -> Judged:
    """3-para-bias more than doubled at 4×; 2-para-wht ≤ 1.05 of its 1× at every length"""
    bias = _grown(e, MORE, "KerpleBias3", 4)
    weight = e.values(MORE, "KerpleWeight2")
    flat = {n: ratio(weight[n], weight[_trained(e)]) for n in weight.columns if n > _trained(e)}
    found = f"3-para-bias at 4× against 1×: {percent(bias)}; 2-para-wht: {_by_length(flat, _trained(e))}"
    return every(above(bias, 2), *(at_most(r, 1.05) for r in flat.values())), found, f"{MORE}/{TABLE}"


def c9(e: Evidence) -> Judged:
    """mean loss of positions 1× to 2×, 2× to 4×, 4× to 8×: each no higher than the one before"""
    losses, t = _by_position(e, "KerpleLog", "full"), _trained(e)
    octaves = [(n, 2 * n) for n in (t, 2 * t, 4 * t) if 2 * n <= _reach(losses)]
    if len(octaves) < 3:
        raise Untested("demo/position_wise.csv does not reach 8× the training length")
    means = {n: losses[[p for p in losses.columns if n <= p < end]].mean(axis=1) for n, end in octaves}
    steps = [np.exp(means[b] - means[a]) for (a, _), (b, _) in pairwise(octaves)]
    found = "from octave to octave of positions: " + ", ".join(percent(s) for s in steps)
    return every(*(at_most(s) for s in steps)), found, f"{DEMO}/position_wise.csv"


def c10(e: Evidence) -> Judged:
    """mean loss at positions from 4× on: full no higher than windowed at 1×"""
    far = [n for n in _by_position(e, "KerpleLog", "full").columns if n >= 4 * _trained(e)]
    if not far:
        raise Untested("demo/position_wise.csv does not reach 4× the training length")
    full, windowed = (_by_position(e, "KerpleLog", which)[far].mean(axis=1) for which in ("full", "windowed"))
    gain = np.exp(full - windowed)
    return at_most(gain), f"full against windowed, positions from 4× on: {percent(gain)}", f"{DEMO}/position_wise.csv"


def c11(e: Evidence) -> Judged:
    """bins of positions beyond 1× where loss is above log-windowed's: at least 90% for ALiBi, under half for T5"""
    reference = _by_position(e, "KerpleLog", "windowed")
    later = [n for n in reference.columns if n >= _trained(e)]  # before that nothing is outside the window
    alibi, t5 = ((_by_position(e, s, "full") > reference)[later].mean(axis=1) for s in ("ALiBi", "T5"))
    found = f"share of positions beyond 1× above log-windowed: ALiBi {alibi.mean():.2f}, T5 {t5.mean():.2f}"
    return every(all_seeds(alibi >= 0.9), all_seeds(t5 < 0.5)), found, f"{DEMO}/position_wise.csv"


def c12(e: Evidence) -> Judged:
    """heads with a bias above -4 nats (e⁻⁴ = 2% of the weight) at 32×: two or more for log, fewer for the others"""
    flat = {}
    for strategy in ("KerpleLog", "KerplePower", "ALiBi"):
        rows = e.rows(DEMO, "kernels", strategy)
        farthest = rows[rows["distance"] == rows["distance"].max()]
        flat[strategy] = (farthest["bias"] > FLAT).groupby(farthest["seed"]).sum()
    found = "heads above -4 nats at the longest distance: " + ", ".join(f"{s} {f.mean():.2g}" for s, f in flat.items())
    several, others = all_seeds(flat["KerpleLog"] >= 2), [all_seeds(flat[s] < 2) for s in ("KerplePower", "ALiBi")]
    return every(several, *others), found, f"{DEMO}/kernels.csv"


def c13(e: Evidence) -> Judged:
    """growth from 1× to 8× and to 32× larger than with shared parameters"""
    found = {n: ratio(_grown(e, MORE, "KerpleLog per layer", n), _grown(e, MORE, "KerpleLog", n)) for n in (8, 32)}
    text = "growth per layer against shared: " + ", ".join(f"{n}× {percent(r)}" for n, r in found.items())
    return every(*(above(r) for r in found.values())), text, f"{MORE}/{TABLE}"


def c14(e: Evidence) -> Judged:
    """tokens per second in training, NoPE's over log's, ≤ 1.03; runs side by side on one machine"""
    log, nope = (e.rows(DEMO, "costs", s).set_index("seed")["tokens_per_second"] for s in ("KerpleLog", "NoPE"))
    cost = ratio(nope, log)
    return (
        at_most(cost, 1.03),
        f"time of a step against NoPE's, runs side by side: {percent(cost)}",
        f"{DEMO}/costs.csv",
    )


def c15(e: Evidence) -> Judged:
    """from 64 to 512 tokens: `full` falls by more than 0.5%, `sliding` with stride 32 does not"""
    full = e.values("sliding", "ALiBi")
    names = [p for p in e.rows("sliding", "results", "ALiBi")["protocol"].unique() if str(p).startswith("sliding")]
    if not names:
        raise Untested("no sliding protocol of ALiBi in sliding/results.csv")
    changes = growth(full), growth(e.values("sliding", "ALiBi", str(names[0])))
    found = f"longest against shortest length: non-overlapping {percent(changes[0])}, sliding {percent(changes[1])}"
    return every(at_most(changes[0], 1 - TIE), above(changes[1], 1 - TIE)), found, f"sliding/{TABLE}"


def c16(e: Evidence) -> Judged:
    """growth from 1× to the longest length in this order, ALiBi's ≤ 1.05"""
    order = ("Sinusoidal", "RoPE", "T5", "ALiBi")
    grown = {s: growth(e.values(DEMO, s)) for s in order}
    found = "longest length against 1×: " + ", ".join(f"{s} {percent(r)}" for s, r in grown.items())
    steps = [above(ratio(grown[a], grown[b])) for a, b in pairwise(order)]
    return every(*steps, at_most(grown["ALiBi"], 1.05)), found, f"{DEMO}/{TABLE}"


def c17(e: Evidence) -> Judged:
    """from training at 128 instead of 64, T5 gains most tokens beyond that length until perplexity is 5% worse"""
    gains = {}
    for strategy in ("T5", "RoPE", "Sinusoidal"):
        once, twice = _reached(e.values(DEMO, strategy), 1), _reached(e.values(SETTINGS, f"{strategy} at 128"), 2)
        gains[strategy] = (twice - once).dropna()
    found = "tokens of reach gained: " + ", ".join(f"{s} {g.mean():.0f}" for s, g in gains.items())
    more = [all_seeds((gains["T5"] - gains[s]).dropna() > 0) for s in ("RoPE", "Sinusoidal")]
    return every(*more), found, f"{SETTINGS}/{TABLE}"


def c18(e: Evidence) -> Judged:
    """same segments, started 48 (learned) or most positions later: > 0.5% worse if absolute, within 0.1% if relative"""
    answers, found = [], []
    for place, strategy in (
        (MORE, "Learned"),
        (DEMO, "Sinusoidal"),
        *((DEMO, s) for s in ("RoPE", "T5", "ALiBi", "KerpleLog")),
    ):
        rows = e.rows(place, "shift", strategy)
        ppl = rows.pivot(index="seed", columns="shift", values="ppl")
        shift = 48 if strategy == "Learned" else max(ppl.columns)  # a learned table ends at the training length
        change = ratio(ppl[shift], ppl[0])
        absolute = strategy in ("Learned", "Sinusoidal")
        answers.append(above(change, 1 + TIE) if absolute else within(change, 0.001))
        found.append(f"{strategy} {percent(change)}")
    return every(*answers), "started later: " + ", ".join(found), f"{DEMO}/shift.csv, {MORE}/shift.csv"


def c19(e: Evidence) -> Judged:
    """standard deviation of each mixed term of the scores under half that of word-word and of position-position"""
    rows = e.rows(DEMO, "four_terms", "Sinusoidal")
    terms = rows.groupby(["seed", "term"])["standard_deviation"].mean().unstack()
    mixed = terms[["word-position", "position-word"]].max(axis=1)
    pure = terms[["word-word", "position-position"]].min(axis=1)
    found = "standard deviation of scores: " + ", ".join(f"{t} {terms[t].mean():.2g}" for t in terms.columns)
    return at_most(ratio(mixed, pure), 0.5), found, f"{DEMO}/four_terms.csv"


def c20(e: Evidence) -> Judged:
    """perplexity at 1×: clip 0 more than 5% above clip 16, clip 2 within 1% of it"""
    at = {clip: e.values(SETTINGS, f"Shaw clip {clip}")[_trained(e)] for clip in (0, 2, 16)}
    none, two = ratio(at[0], at[16]), ratio(at[2], at[16])
    found = f"at 1×, against clip 16: clip 0 {percent(none)}, clip 2 {percent(two)}"
    return every(above(none, 1.05), within(two, 0.01)), found, f"{SETTINGS}/{TABLE}"


def c21(e: Evidence) -> Judged:
    """at 1× ≤ 1.1 of the mean of RoPE, T5, ALiBi, log; growth to the longest length larger than ALiBi's"""
    strategies = ("RoPE", "T5", "ALiBi", "KerpleLog")
    others = pd.concat([e.values(DEMO, s)[_trained(e)] for s in strategies], axis=1)
    close = ratio(e.values(DEMO, "NoPE")[_trained(e)], others.mean(axis=1))
    grown = {s: growth(e.values(DEMO, s)) for s in ("NoPE", "ALiBi")}
    found = f"at 1×, against the mean of the relative ones: {percent(close)}; longest length against 1×: "
    found += ", ".join(f"{s} {percent(r)}" for s, r in grown.items())
    return every(at_most(close, 1.1), above(ratio(grown["NoPE"], grown["ALiBi"]))), found, f"{DEMO}/{TABLE}"


def c22(e: Evidence) -> Judged:
    """mean exact match beyond length 20 on repeated letters in this order, ties allowed but first above last"""
    order = ("NoPE", "T5", "ALiBi", "RoPE", "Sinusoidal")
    trained = 20
    tables = {s: e.values("tasks", s, "repeated copy", "exact_match") for s in order}
    scores = {s: v[[n for n in v.columns if n > trained]].mean(axis=1) for s, v in tables.items()}
    found = f"exact match beyond {trained}: " + ", ".join(f"{s} {v.mean():.3f}" for s, v in scores.items())
    # one more than the score: a ratio of scores has no meaning at 0; equal scores, such as 0 and 0, are no wrong order
    steps = [above((1 + scores[a]) / (1 + scores[b]), 1 - TIE) for a, b in pairwise(order)]
    return every(*steps, above((1 + scores[order[0]]) / (1 + scores[order[-1]]), 1 + TIE)), found, f"tasks/{TABLE}"


def c23(e: Evidence) -> Judged:
    """growth from 1× to the longest length larger with twice the tokens"""
    less, more = (growth(e.values(SETTINGS, s)) for s in ("KerpleLog", "KerpleLog 2x tokens"))
    found = f"log, longest length against 1×: {percent(less)}, with twice the tokens {percent(more)}"
    return above(ratio(more, less)), found, f"{SETTINGS}/{TABLE}"


def c24(e: Evidence) -> Judged:
    """perplexity at each length above 256 higher with angles rounded to bf16"""
    exact, rounded = e.values(DEMO, "RoPE"), e.values(MORE, "RoPE in bf16")
    ratios = {n: ratio(rounded[n], exact[n]) for n in exact.columns if n > 256 and n in rounded}
    found = "bf16 against fp32 angles: " + _by_length(ratios, _trained(e))
    return every(*(above(r) for r in ratios.values())), found, f"{MORE}/{TABLE}"


def _trained(e: Evidence) -> int:
    """Training length of the demo's comparison: its shortest evaluation length."""
    return int(min(e.values(DEMO, "KerpleLog").columns))


def _against(e: Evidence, comparison: str, ours: str, theirs: str, beyond: bool = False) -> dict[int, pd.Series]:
    a, b = e.values(comparison, ours), e.values(comparison, theirs)
    lengths = [n for n in sorted(a.columns) if n in b and (not beyond or n > _trained(e))]
    return {int(n): ratio(a[n], b[n]) for n in lengths}


def _grown(e: Evidence, comparison: str, strategy: str, times: int) -> pd.Series:
    """Perplexity at a multiple of the training length, against that at the training length."""
    values, first = e.values(comparison, strategy), _trained(e)
    if times * first not in values:
        raise Untested(f"no {strategy} at {times}× in {comparison}/results.csv")
    return ratio(values[times * first], values[first])


def _by_position(e: Evidence, strategy: str, which: str) -> pd.DataFrame:
    """Mean loss in nats: seeds down, first positions of bins across."""
    rows = e.rows(DEMO, "position_wise", strategy)
    return rows.assign(loss=rows[f"nll_{which}"] / rows["targets"]).pivot(index="seed", columns="first", values="loss")


def _reach(losses: pd.DataFrame) -> int:
    first = sorted(losses.columns)
    return first[-1] + (first[1] - first[0] if len(first) > 1 else 1)


def _reached(values: pd.DataFrame, start: int, allowed: float = 1.05) -> pd.Series:
    """Tokens beyond the training length (the ``start``-th length) to which perplexity is within ``allowed`` of its own
    there.

    Between two lengths, along the straight line in log2 of the length. At most the longest length.
    """
    lengths = sorted(values.columns)
    lengths = lengths[start - 1 :]
    reached = {}
    for seed, row in values.iterrows():
        relative, end = [row[n] / row[lengths[0]] for n in lengths], float(lengths[-1])
        for i in range(1, len(lengths)):
            if relative[i] > allowed:
                share = (allowed - relative[i - 1]) / (relative[i] - relative[i - 1])
                end = 2 ** (np.log2(lengths[i - 1]) + share * np.log2(lengths[i] / lengths[i - 1]))
                break
        reached[seed] = end - lengths[0]
    return pd.Series(reached)


def _by_length(ratios: dict[int, pd.Series], trained: int) -> str:
    return ", ".join(f"{n // trained}× {percent(r)}" for n, r in ratios.items())
