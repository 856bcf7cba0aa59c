"""The result of a search: the comparison of the best method with others on test text."""

from dataclasses import asdict
from typing import Any

from kerple.extend.methods import Method
from kerple.extend.search import TEST, Losses, Search
from kerple.measure.far_context import mean_interval, verdict
from kerple.measure.gap import GapCurve
from kerple.positions.visibility import EVERYTHING


def outcome(search: Search, ranked: list[Method], blocks: int) -> dict[str, Any]:
    """Compare the best method on test text with the next one, and with the unchanged model at N and at L tokens.

    Args:
        search: The search.
        ranked: The methods that it has chosen, best first.
        blocks: Number of blocks of test text.

    Returns:
        ``best`` (the options of the method), ``next`` (the label of the next, or None), ``helps``, ``far_context`` (its
        verdict), ``gap`` (the report of `GapCurve`, unless the method is a window), ``losses`` of these methods by
        number of tokens, and ``effects``: mean differences of losses, and the ends of their 95% intervals.
    """
    unchanged, best, short, long = search.methods[0], ranked[0], search.length, search.target

    def of(method: Method, length: int, reading: str = "own") -> Losses:
        return search.losses(method, TEST, length, blocks, reading)

    near, far = of(best, short), of(best, long)
    differences = {"unchanged": far - of(unchanged, long), "shortened": far - of(unchanged, short)}
    differences |= {"next": far - of(ranked[1], long)} if ranked[1:] else {}
    differences |= {"rise": near - of(unchanged, short), "gain": near - far, "content": of(best, long, "foreign") - far}
    effects = {name: mean_interval(difference) for name, difference in differences.items()}
    losses = {m.label: {n: float(of(m, n).mean()) for n in (short, long)} for m in [unchanged, *ranked[:2]]}
    found = {"best": asdict(best), "helps": effects["unchanged"][2] < 0 and effects["shortened"][2] < 0}
    found["far_context"] = verdict(effects["gain"][1:], effects["content"][1:])
    if best.visibility == EVERYTHING:
        context, k, documents = min(256, short // 2), min(64, search.k), min(12, len(search.blocks[TEST][0]))
        gap = GapCurve([long // 8, long // 4, long // 2, long - context - k], context, k, documents)
        found["gap"] = gap.run(search.network(best), search.texts[TEST], search.runner).report
    return found | {"next": ranked[1].label if ranked[1:] else None, "losses": losses, "effects": effects}
