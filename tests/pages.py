"""The code and the commands of the pages in docs/how-to, for tests that run them."""

import re
import shlex
import sys
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[1] / "docs/how-to"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)


def commands(page: str) -> list[list[str]]:
    """Arguments of run.py in each command of a page."""
    lines = (PAGES / page).read_text().replace("\\\n", "").splitlines()
    return [shlex.split(line)[2:] for line in lines if line.startswith("    python run.py ")]


def put(page: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the code of a page into a file. Its folder becomes the working folder, and is added to ``sys.path``."""
    file.write_text(blocks(page, "python")[0])
    monkeypatch.chdir(file.parent)
    monkeypatch.syspath_prepend(file.parent)
    monkeypatch.setitem(sys.modules, file.stem, None)  # removes the module at the end of the test
    del sys.modules[file.stem]
    return file
