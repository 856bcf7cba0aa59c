"""Comparison on test text of the best context-extension method with the second-best, and with the unchanged model."""

from dataclasses import asdict
from functools import partial
from typing import Any

from kerple.extend.methods import Method
from kerple.extend.search import TEST, Search
from kerple.measure.far_context import mean_interval, verdict
from kerple.measure.gap import GapCurve
from kerple.positions.visibility import EVERYTHING


def compare_best(search: Search, ranked: list[Method], blocks: int) -> dict[str, Any]:
    """Compare the best method of a search with the second-best, and with the unchanged model.

    Let N be the target length and L the training length of the search. Each effect is a mean difference of losses in
    nats per target, with its 95% interval (mean, low, high):

    - ``unchanged``: the best method at N, minus the unchanged model at N.
    - ``shortened``: the best method at N, minus the unchanged model at L.
    - ``next``: the best method at N, minus the second-best at N. It is missing if there is only one method.
    - ``rise``: the best method at L, minus the unchanged model at L.
    - ``gain``: the best method at L, minus the same method at N.
    - ``content``: the best method at N if the inputs before the last L are from another document, minus the best method
      at N with the original inputs.

    Args:
        search: The search.
        ranked: The methods that `Search.choose` returns, the best first.
        blocks: Number of blocks of test text.

    Returns:
        A dictionary with these keys:

        - ``effects``: the effects above, by name.
        - ``helps``: whether ``unchanged`` and ``shortened`` are both significantly below 0.
        - ``far_context``: the conclusion about distant text, see `kerple.measure.far_context.verdict`.
        - ``best``: the fields of the best method.
        - ``next``: the label of the second-best method, or None.
        - ``losses``: mean losses in nats per target, by label and length.
        - ``gap``: the report of `GapCurve`; missing if the best method is a window method.
    """
    unchanged, best = search.methods[0], ranked[0]
    short, long = search.length, search.target
    losses = partial(search.losses, split=TEST, blocks=blocks)
    best_short, best_long = losses(best, length=short), losses(best, length=long)
    differences = {
        "unchanged": best_long - losses(unchanged, length=long),
        "shortened": best_long - losses(unchanged, length=short),
        "rise": best_short - losses(unchanged, length=short),
        "gain": best_short - best_long,
        "content": losses(best, length=long, context="foreign") - best_long,
    }
    if ranked[1:]:
        differences["next"] = best_long - losses(ranked[1], length=long)
    effects = {name: mean_interval(difference) for name, difference in differences.items()}
    result = {"best": asdict(best), "helps": effects["unchanged"][2] < 0 and effects["shortened"][2] < 0}
    result["far_context"] = verdict(effects["gain"][1:], effects["content"][1:])
    if best.visibility == EVERYTHING:
        context, k, documents = min(256, short // 2), min(64, search.k), min(12, len(search.blocks[TEST][0]))
        gap = GapCurve([long // 8, long // 4, long // 2, long - context - k], context, k, documents)
        result["gap"] = gap.run(search.network(best), search.texts[TEST], search.runner).report
    means = {m.label: {n: float(losses(m, length=n).mean()) for n in (short, long)} for m in [unchanged, *ranked[:2]]}
    return result | {"next": ranked[1].label if ranked[1:] else None, "losses": means, "effects": effects}
