"""The findings page is short and what it names is there; README's tables are those of the reports.

That the page's numbers are those of the runs, test_judge.py says.
"""

import re
from itertools import takewhile
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "results"


def test_the_page_is_one_screen_whose_files_and_claims_are_there() -> None:
    page = (RESULTS / "README.md").read_text()
    assert len(page.split()) <= 700
    findings = re.findall(r"^\d+\. .*(?:\n .*)*", page, re.MULTILINE)
    assert len(findings) == 10
    for finding in findings:
        assert re.search(r"\[[+−]?\d.*\]|\d+\.\d+ at", finding.replace("\n", " ")), finding
        assert re.search(r"\]\(|CLAIMS", finding), finding
    for path in re.findall(r"\]\(([^)#]+)\)", page):
        assert (RESULTS / path).exists(), path
    claims = (RESULTS / "CLAIMS.md").read_text()
    for claim in set(re.findall(r"\bC\d+", page)):
        assert f"| {claim} |" in claims or f"{claim} (" in claims


def test_the_readme_has_the_table_of_the_demo() -> None:
    lines, table = (p.read_text().splitlines() for p in (RESULTS.parent / "README.md", RESULTS / "quick/table.md"))
    start = next(i for i, line in enumerate(lines) if line.startswith("|") and "2048 (32×)" in line)
    said = list(takewhile(lambda line: line.startswith("|"), lines[start + 2 :]))
    assert len(said) > 3
    for name, *values in map(_cells, said):
        row = next(row for row in table if row.startswith(f"| {name} |"))
        assert _cells(row)[1 : len(values) + 1] == values, name


def _cells(line: str) -> list[str]:
    return [re.sub(r"\*\*|†", "", cell).strip() for cell in line.strip().strip("|").split("|")]
