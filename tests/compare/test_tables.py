"""Tables by themselves: what a page has room for, and what LaTeX says of them."""

import re
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest
from kerple.compare.collect import Run, Runs, read

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
        found = re.findall(r"(\d)\.(\d\d) \$\\pm\$", "".join(lines))
        assert found == [(str(row), f"{length:02d}") for length in LENGTHS]
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


def test_costs_of_different_tasks_are_not_averaged(tmp_path: Path) -> None:
    runs = []
    for part, of_its_own in (("copy", 8), ("reverse", 16)):
        for strategy in ("NoPE", "KerpleLog"):
            for seed in (1235, 1237):
                place = tmp_path / part / strategy / f"seed-{seed}"
                write_run(place, strategy, seed, CURVES["KerpleLog"], position_parameters=of_its_own)
                runs.append(Run(strategy, seed, place, part=part))
    body = costs(read(sorted(runs, key=lambda run: run.strategy, reverse=True))).body
    assert list(body.index) == ["copy NoPE", "copy KerpleLog", "reverse NoPE", "reverse KerpleLog"]
    assert [cell.text for cell in body["position parameters"]] == ["8", "8", "16", "16"]
    assert {cell.text for cell in body["tokens per second"]} == {"27,236"}  # 26,000 + the mean of 1235 and 1237


def test_sizes_that_differ_inside_a_row_of_costs_are_a_span(tmp_path: Path) -> None:
    runs = [
        Run("T5", seed, write_run(tmp_path / str(seed), "T5", seed, CURVES["RoPE"], position_parameters=own))
        for seed, own in ((1235, 128), (1236, 32))
    ]
    row = costs(read(runs)).body.loc["T5"]
    assert (row["position parameters"].text, row["all parameters"].text) == ("32–128", "1,310,000")


def test_a_mean_of_seeds_is_printed_in_the_digits_that_mean_something() -> None:
    assert number(0.98321, 0.00449) == "0.983 ± 0.004"
    assert number(21.4321, 0.0617) == "21.43 ± 0.06"
    assert number(269.33, 33.4) == "269.3 ± 33.4"
    assert number(30046.2, 12123.4) == "30046 ± 12123"
    assert number(21.4, float("nan")) == "21.40"
    assert number(float("inf"), float("nan")) == "∞"


@pytest.mark.parametrize(
    ("metric", "by"), [("ppl", "text"), ("exact_match", "problems"), ("token_accuracy", "problems")]
)
def test_a_note_names_every_variation_that_the_test_has(metric: str, by: str) -> None:
    cells = [("NoPE", 1, 0.5), ("NoPE", 2, 0.6), ("RoPE", 1, 0.4), ("RoPE", 2, 0.3)]
    cell = {"metric": metric, "protocol": "p", "length": 8}
    results = pd.DataFrame([{"strategy": name, "seed": seed, "value": value, **cell} for name, seed, value in cells])
    block = [
        {**row, "block": i, "sum": (i + row["seed"]) % 3, "count": 4}
        for row in results.to_dict("records")
        for i in (0, 1)
    ]
    for blocks, over in ((pd.DataFrame(block), f"over seeds and {by};"), (None, "over seeds;")):
        summary = summarise(results, "NoPE", blocks=blocks)
        assert (summary["blocks"].max() > 1) == (blocks is not None)
        assert over in comparison(summary, metric, "p", None, "NoPE").note


@pytest.mark.parametrize(
    ("seeds", "over"),
    [
        ((1, 1), "over text alone: one seed."),
        ((1, 2), "over text, and over seeds where there is more than one."),
        ((2, 2), "over seeds and text."),
    ],
)
def test_a_note_says_over_what_the_intervals_of_ratios_are(seeds: tuple[int, int], over: str) -> None:
    cell = {"metric": "ppl", "protocol": "full", "length": 8}
    runs = [
        ("NoPE", 1),
        ("NoPE", 2),
        *(("RoPE", i + 1) for i in range(seeds[0])),
        *(("T5", i + 1) for i in range(seeds[1])),
    ]
    blocks = [
        {"strategy": name, "seed": seed, **cell, "block": i, "sum": 4.0 + len(name) + (i * seed) % 3, "count": 4}
        for name, seed in runs
        for i in (0, 1)
    ]
    results = pd.DataFrame(
        [{"strategy": name, "seed": seed, **cell, "value": 10.0 + len(name) + seed} for name, seed in runs]
    )
    summary = summarise(results, "NoPE", blocks=pd.DataFrame(blocks))
    for table in (comparison(summary, "ppl", "full", 8, "NoPE"), intervals(summary, "ppl", "full", 8, "NoPE")):
        assert table.note.endswith(over)


@pytest.mark.parametrize(
    ("seeds", "over"),
    [
        ((1, 1), "over text alone: one seed."),
        ((1, 2), "over text, and over seeds where"),
        ((2, 2), "over seeds and text."),
    ],
)
def test_a_note_says_over_what_the_intervals_of_context_gains_are(seeds: tuple[int, int], over: str) -> None:
    blocks = [
        {"strategy": name, "seed": seed, "metric": "ppl", "protocol": protocol, "length": 16, "block": i}
        | {"sum": 4.0 + (i * seed) % 3 + (protocol != "full"), "count": 4}
        for name, count in zip(("NoPE", "T5"), seeds, strict=True)
        for seed in range(1, count + 1)
        for protocol in ("full", "windowed8")
        for i in (0, 1)
    ]
    none = pd.DataFrame()
    summary = pd.DataFrame({"strategy": ["NoPE", "T5"]})
    of_part = [block | {"protocol": f"code {block['protocol']}"} for block in blocks]
    runs = Runs(none, pd.DataFrame(blocks + of_part), none, {}, {}, {}, {})
    part = distant(summary, runs, "code windowed8", 8)
    assert part is not None
    assert part.title == "Context gain beyond 8 tokens, code"
    assert "code windowed8 minus code full" in part.note
    table = distant(summary, runs, "windowed8", 8)
    assert table is not None
    assert table.body.equals(part.body)
    assert f"95% interval {over}" in table.note
    assert table.body["16 (2×)"].map(lambda cell: cell.text[:7]).tolist() == ["+0.2500"] * 2
