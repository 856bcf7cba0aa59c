"""Tables by themselves: what a page has room for, and what LaTeX says of them."""

import re
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from kerple.compare.runs import Run, read
from kerple.compare.statistics import summarise
from kerple.compare.tables import Cell, Table, comparison, costs, distant, intervals, number
from tests.compare.runs_on_disk import CURVES, write_run

ROWS, LENGTHS = ["NoPE", "a_b & 50% <x> ~^\\"], list(range(1, 14))


@pytest.fixture
def wide() -> Table:
    cells = [[Cell(f"{row}.{length:02d} ± 0.10†", bold=length == 3) for length in LENGTHS] for row in range(len(ROWS))]
    body = pd.DataFrame(cells, index=ROWS, columns=[f"{length} (1×)" for length in LENGTHS])
    return Table("Exact match, 100%", body, "best < all")


def test_columns_that_a_page_has_no_room_for_go_below_the_others(wide: Table) -> None:
    parts = re.findall(r"\\toprule\n(.*?)\\bottomrule", wide.latex(), re.DOTALL)
    assert [len(part.splitlines()[0].split(" & ")) - 1 for part in parts] == [5, 4, 4]
    for row, name in enumerate(("NoPE", r"a\_b")):
        lines = [line for part in parts for line in part.splitlines() if line.startswith(name)]
        cells = re.findall(r"(\d)\.(\d\d) \$\\pm\$", "".join(lines))
        assert cells == [(str(row), f"{length:02d}") for length in LENGTHS]
    assert wide.latex().count(r"\caption") == 1


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no LaTeX here")
def test_latex_takes_it_and_it_fits_the_line(wide: Table, tmp_path: Path) -> None:
    document = r"\documentclass{article}\usepackage{booktabs,graphicx}\begin{document}%s\end{document}"
    (tmp_path / "table.tex").write_text(document % wide.latex())
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "table.tex"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
    assert "Overfull" not in ended.stdout
    assert "Output written" in ended.stdout


def test_costs_of_different_tasks_are_not_averaged_and_sizes_of_different_seeds_are_a_span(tmp_path: Path) -> None:
    runs = []
    for part, parameters in (("copy", 8), ("reverse", 16)):
        for strategy in ("NoPE", "KerpleLog"):
            for i, seed in enumerate((1235, 1237)):
                cost = {"position_parameters": parameters + (i if strategy == "KerpleLog" else 0)}
                folder = tmp_path / part / strategy / f"seed-{seed}"
                test = write_run(folder, strategy, seed, CURVES["KerpleLog"], **cost)
                runs.append(Run(strategy, seed, test, part))
    body = costs(read(sorted(runs, key=lambda run: run.strategy, reverse=True)).costs).body
    assert list(body.index) == ["copy NoPE", "copy KerpleLog", "reverse NoPE", "reverse KerpleLog"]
    assert [cell.text for cell in body["position parameters"]] == ["8", "8–9", "16", "16–17"]
    assert {cell.text for cell in body["tokens per second"]} == {"27,236"}  # 26,000 + the mean of 1235 and 1237


@pytest.mark.parametrize(
    ("mean", "std", "text"),
    [
        (0.98321, 0.00449, "0.983 ± 0.004"),
        (21.4321, 0.0617, "21.43 ± 0.06"),
        (269.33, 33.4, "269.3 ± 33.4"),
        (30046.2, 12123.4, "30046 ± 12123"),
        (21.4, float("nan"), "21.40"),
        (float("inf"), float("nan"), "∞"),
    ],
)
def test_a_mean_of_seeds_is_printed_in_the_digits_that_mean_something(mean: float, std: float, text: str) -> None:
    assert number(mean, std) == text


def losses(seeds: dict[str, int], metric: str = "ppl", protocols: tuple[str, ...] = ("full",)) -> pd.DataFrame:
    """Sums of two blocks of each run; those of a second protocol are larger by 1 / 4 of a nat."""
    rows = [
        {"strategy": name, "seed": seed, "metric": metric, "protocol": protocol, "length": 16, "block": block}
        | {"sum": 4.0 + len(name) + (block * seed) % 3 + i, "count": 4}
        for name, count in seeds.items()
        for seed in range(1, count + 1)
        for i, protocol in enumerate(protocols)
        for block in (0, 1)
    ]
    return pd.DataFrame(rows)


def summary_of(blocks: pd.DataFrame, with_text: bool = True) -> pd.DataFrame:
    keys = ["strategy", "seed", "metric", "protocol", "length"]
    results = blocks.groupby(keys, sort=False, as_index=False)["sum"].mean().rename(columns={"sum": "value"})
    return summarise(results, "NoPE", blocks=blocks if with_text else None)


@pytest.mark.parametrize(("metric", "by"), [("ppl", "text"), ("exact_match", "problems")])
def test_a_note_names_every_variation_that_the_test_has(metric: str, by: str) -> None:
    blocks = losses({"NoPE": 2, "T5": 2}, metric)
    for with_text, over in ((True, f"over seeds and {by};"), (False, "over seeds;")):
        assert over in comparison(summary_of(blocks, with_text), None, "NoPE").note


@pytest.mark.parametrize(
    ("seeds", "over"),
    [
        ((1, 1), "over text alone: one seed"),
        ((1, 2), "over text, and over seeds where there is more than one"),
        ((2, 2), "over seeds and text"),
    ],
)
def test_a_note_says_over_what_intervals_are(seeds: tuple[int, int], over: str) -> None:
    ratios = summary_of(losses({"NoPE": 2, "RoPE": seeds[0], "T5": seeds[1]}))
    for table in (comparison(ratios, 8, "NoPE"), intervals(ratios, 8, "NoPE")):
        assert table is not None
        assert table.note.endswith(f"{over}.")
    counts = dict(zip(("NoPE", "T5"), seeds, strict=True))
    protocols = ("full", "windowed8")
    blocks = pd.concat([losses(counts, protocols=tuple(prefix + p for p in protocols)) for prefix in ("", "code ")])
    table, part = (distant(ratios, blocks, f"{prefix}windowed8", 8) for prefix in ("", "code "))
    assert table is not None
    assert part is not None
    assert part.title == "Context gain beyond 8 tokens, code"
    assert table.body.equals(part.body)
    assert f"95% interval {over}. Above 0" in table.note
    assert table.body["16 (2×)"].map(lambda cell: cell.text[:7]).tolist() == ["+0.2500"] * 2
