"""The findings page: every finding has a number and names a file or a claim, and these exist.

That the files hold the numbers is not checked, except for perplexities of the small tier and README's tables.
"""

import re
from itertools import takewhile
from pathlib import Path

import pytest

from kerple.compare.runs import committed, read
from kerple.compare.statistics import summarise

RESULTS = Path(__file__).parents[2] / "results"


def test_every_finding_has_a_number_and_what_it_is_from_is_there() -> None:
    page = (RESULTS / "README.md").read_text()
    findings = [part for part in re.split(r"\n(?=- |#)", page) if part.startswith("- ")]
    assert len(findings) >= 10
    for finding in findings:
        assert re.search(r"\d", re.sub(r"C\d+|\]\([^)]*\)", "", finding)), finding
        assert re.search(r"\]\(|C\d+", finding), finding
    for path in re.findall(r"\]\(([^)#]+)\)", page):
        assert (RESULTS / path).exists(), path
    claims = (RESULTS / "CLAIMS.md").read_text()
    for claim in set(re.findall(r"\bC\d+", page)):
        assert f"| {claim} |" in claims


def test_what_is_said_of_alibi_and_kerple_log_in_the_small_tier_is_in_its_table() -> None:
    page = (RESULTS / "README.md").read_text()
    runs = read(run for run in committed(RESULTS / "small") if run.strategy in ("ALiBi", "KerpleLog"))
    summary = summarise(runs.results, "KerpleLog", blocks=runs.blocks).query("metric == 'ppl'")
    rows = {(r["strategy"], r["protocol"], str(r["length"])): r for r in summary.to_dict("records")}

    def above(length: str) -> tuple[str, ...]:
        row = rows["ALiBi", "full", length]
        return tuple(
            f"{100 * (float(row[key]) - 1):.1f}".replace("-", "−") for key in ("ratio", "ratio_low", "ratio_high")
        )

    said = re.search(r"ALiBi is ([\d.]+)% above KERPLE-log at 1×\*\*, \[([−\d.]+), ([−\d.]+)\]%", page)
    later = re.search(r"and ([\d.]+)% above it at 16×, \[([−\d.]+), ([−\d.]+)\]%", page)
    assert said is not None
    assert said.groups() == above("128")
    assert later is not None
    assert later.groups() == above("2048")
    for strategy in ("ALiBi", "KerpleLog"):
        for protocol, length in (("full", "128"), ("full", "1024"), ("windowed128", "1024")):
            assert f"{float(rows[strategy, protocol, length]['mean']):.2f}" in page


@pytest.mark.parametrize(
    ("columns", "report"),
    [("2048 (32×)", "quick"), ("gain at 4×", "field"), ("gain at 8×", "small"), ("16384 (2×)", "pretrained")],
)
def test_the_readme_repeats_the_tables_of_reports(columns: str, report: str) -> None:
    lines, table = (p.read_text().splitlines() for p in (RESULTS.parent / "README.md", RESULTS / report / "table.md"))
    start = next(i for i, line in enumerate(lines) if line.startswith("|") and columns in line)
    gain = re.search(r"gain at (\d+×)", lines[start])
    said = list(takewhile(lambda line: line.startswith("|"), lines[start + 2 :]))
    assert len(said) > 3
    for name, *values in map(_cells, said):
        label = {"RoPE with a learned sink": "Sink"}.get(name, re.split(r"[ ,]", name)[0])
        row = next(row for row in table if row.startswith(f"| {label} |"))
        assert _cells(row)[1 : len(values) + (not gain)] == values[: len(values) - bool(gain)], name
        if gain:
            head = next(i for i, line in enumerate(table) if line.startswith("### Context gain"))
            column = next(i for i, cell in enumerate(_cells(table[head + 2])) if gain[1] in cell)
            row = next(row for row in table[head:] if row.startswith(f"| {label} |"))
            assert _cells(row)[column].replace("-", "−") == values[-1], name


def _cells(line: str) -> list[str]:
    return [re.sub(r"\*\*|†", "", cell).strip() for cell in line.strip().strip("|").split("|")]
