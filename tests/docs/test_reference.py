"""The pages of the reference."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["callbacks", "data", "tasks"])
def test_a_page_that_lists_modules_lists_all_of_them(page: str) -> None:
    listed = re.findall(r"^        - (\w+)$", (ROOT / f"docs/reference/{page}.md").read_text(), re.MULTILINE)
    folder = ROOT / "src/kerple" / page
    modules = [path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()]

    assert sorted(listed) == sorted(set(modules) - {"__init__"})


def test_every_package_has_a_page() -> None:
    named = {
        name for page in (ROOT / "docs/reference").glob("*.md") for name in re.findall(r"::: (\S+)", page.read_text())
    }
    packages = {f"kerple.{path.parent.name}" for path in (ROOT / "src/kerple").glob("*/__init__.py")}

    assert packages - named == {"kerple.cli"}  # commands, whose options `--help` lists
