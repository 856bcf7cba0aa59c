"""Tables by themselves: what a page has room for, and what LaTeX says of them."""

import re
from pathlib import Path

import pandas as pd
import pytest

from kerple.compare.runs import Run, read_runs
from kerple.compare.tables import Cell, Table, costs
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


def test_costs_of_different_tasks_are_not_averaged_and_sizes_of_different_seeds_are_a_span(tmp_path: Path) -> None:
    runs = []
    for part, parameters in (("copy", 8), ("reverse", 16)):
        for strategy in ("NoPE", "KerpleLog"):
            for i, seed in enumerate((1235, 1237)):
                cost = {"position_parameters": parameters + (i if strategy == "KerpleLog" else 0)}
                folder = tmp_path / part / strategy / f"seed-{seed}"
                test = write_run(folder, strategy, seed, CURVES["KerpleLog"], **cost)
                runs.append(Run(strategy, seed, test, part))
    body = costs(read_runs(sorted(runs, key=lambda run: run.strategy, reverse=True)).costs).body
    assert list(body.index) == ["copy NoPE", "copy KerpleLog", "reverse NoPE", "reverse KerpleLog"]
    assert [cell.text for cell in body["position parameters"]] == ["8", "8–9", "16", "16–17"]
    assert {cell.text for cell in body["tokens per second"]} == {"27,236"}  # 26,000 + the mean of 1235 and 1237
