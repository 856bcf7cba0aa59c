"""Copies docs/ to site-src/, and adds pages of the tables in results/ and of the reference.

In docs/, pages link to files in results/ and folders in src/. In site-src/, these links lead to the added pages.
"""

import os
import re
import shutil
import sys
from pathlib import Path
from pkgutil import iter_modules

ROOT = Path(__file__).parents[1]
DOCS, SITE = ROOT / "docs", ROOT / "site-src"
PACKAGES = sorted(path.parent for path in (ROOT / "src/kerple").glob("*/__init__.py") if path.parent.name != "cli")
REEXPORTS = ("data", "tasks")  # packages whose __init__.py imports names that their modules document


def target(link: str, page: Path) -> str:
    """Return the target of a link in site-src/. ``page`` is the path of the page with the link, relative to docs/."""
    parts = Path(os.path.relpath(DOCS / page.parent / link, ROOT)).parts
    if parts[0] == "results" and parts[-1] == "table.md":
        path = "/".join(parts[:-1]) + ".md"
    elif parts[:2] == ("src", "kerple") and len(parts) == 3 and ROOT.joinpath(*parts) in PACKAGES:
        path = f"reference/{parts[2]}.md"
    else:
        return link
    return os.path.relpath(path, page.parent)


def reference(package: Path) -> str:
    """Return the page of the reference on a package."""
    members = ""
    if package.name in REEXPORTS:
        modules = [module.name for module in iter_modules([package]) if module.name[0] != "_"]
        members = f"\n      members: [{', '.join(modules)}]"
    return f"# kerple.{package.name}\n\n::: kerple.{package.name}\n    options:\n      show_submodules: true{members}\n"


if __name__ == "__main__":
    shutil.rmtree(SITE, ignore_errors=True)
    shutil.copytree(DOCS, SITE, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for path in SITE.rglob("*.md"):
        page = path.relative_to(SITE)
        text = re.sub(r"(?<=\]\()[^)#:\s]+", lambda match: target(match[0], page), path.read_text(encoding="utf-8"))  # noqa: B023
        path.write_text(text, encoding="utf-8")
    for table in (ROOT / "results").rglob("table.md"):
        front = "---\nhide:\n  - toc # wide tables need the space\n---\n\n"
        page = SITE / table.parent.relative_to(ROOT).with_suffix(".md")
        page.parent.mkdir(exist_ok=True)
        page.write_text(front + table.read_text(encoding="utf-8"), encoding="utf-8")
    (SITE / "reference").mkdir()
    for package in PACKAGES:
        (SITE / "reference" / f"{package.name}.md").write_text(reference(package), encoding="utf-8")
    pages = re.findall(r'"([^"]+\.md)"', (ROOT / "zensical.toml").read_text(encoding="utf-8"))
    if missing := [page for page in pages if not (SITE / page).exists()]:  # zensical ignores them
        sys.exit(f"zensical.toml: missing pages: {', '.join(missing)}")
