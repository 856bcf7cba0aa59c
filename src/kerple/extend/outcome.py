"""What a search has found, in numbers, as a page, and as a folder that transformers loads."""

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kerple.base.templates import render_template
from kerple.extend.methods import Method
from kerple.extend.search import TEST, Losses, Search, compared
from kerple.measure.far_context import verdict
from kerple.measure.gap import GapCurve
from kerple.positions.visibility import EVERYTHING


def outcome(search: Search, ranked: list[Method], blocks: int) -> dict[str, Any]:
    """Read test text by the best method, the next and the unchanged model.

    Args:
        search: The search.
        ranked: The methods that it has chosen, best first.
        blocks: Number of blocks of test text.

    Returns:
        ``best`` (the options of the method), ``next`` (the label of the next, or None), ``helps``, ``far_context`` (its
        verdict), ``gap`` (lines of its `GapCurve`, unless it is a window), ``losses`` of these methods by number of
        tokens, and ``effects``: the `compared` losses.
    """
    unchanged, best, short, long = search.methods[0], ranked[0], search.length, search.target

    def of(method: Method, length: int, reading: str = "own") -> Losses:
        return search.losses(method, TEST, length, blocks, reading)

    read = [unchanged, *ranked[:2]]
    of_best, of_unchanged = of(best, long), of(unchanged, long)
    effects = {"unchanged": compared(of_best, of_unchanged), "shortened": compared(of_best, of(unchanged, short))}
    effects |= {"next": compared(of_best, of(ranked[1], long))} if ranked[1:] else {}
    effects |= {"rise": compared(of(best, short), of(unchanged, short)), "gain": compared(of(best, short), of_best)}
    effects |= {"content": compared(of(best, long, "foreign"), of_best)}
    losses = {m.label: {n: float(of(m, n).mean()) for n in (short, long)} for m in read}
    found = {"best": asdict(best), "helps": effects["unchanged"][2] < 0 and effects["shortened"][2] < 0}
    found["far_context"] = verdict(effects["gain"][1:], effects["content"][1:])
    if best.visibility == EVERYTHING:
        context, k, documents = min(256, short // 2), min(64, search.k), min(12, len(search.blocks[TEST][0]))
        gap = GapCurve([long // 8, long // 4, long // 2, long - context - k], context, k, documents)
        found["gap"] = gap.run(search.network(best), search.texts[TEST], search.runner).report
    return found | {"next": ranked[1].label if ranked[1:] else None, "losses": losses, "effects": effects}


def render(values: dict[str, Any]) -> tuple[str, str]:
    """The findings as text, and the page."""
    text = render_template("kerple.extend", "findings.txt.jinja", **values)
    return text, render_template("kerple.extend", "page.html.jinja", **values, findings=text)


def link(model: str, config: Any, folder: Path) -> None:
    """Make a folder with a changed configuration and links to the other files of a model, which transformers loads.

    Args:
        model: A folder or a name on the hub.
        config: The `transformers.PreTrainedConfig`.
        folder: The folder; what it holds is replaced.
    """
    from transformers.utils import cached_file

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in Path(str(cached_file(model, "config.json"))).parent.iterdir():
        if file.is_file() and file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    config.save_pretrained(folder)
