"""The findings page: every finding has a number and a file that has it."""

import re
from pathlib import Path

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
