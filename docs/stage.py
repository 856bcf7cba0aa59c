"""Copies docs/ to site-src/, and adds the pages and tables of results/ and pages of the reference.

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
OTHER_PAGES = {  # pages outside docs/ that are not tables, and their paths in site-src/
    "results/models/README.md": "results/models.md",
    "results/earlier/README.md": "results/earlier.md",
    "results/families/converted.md": "results/families-converted.md",
    "results/families/retrofit.md": "results/families-retrofit.md",
    "results/probe/families.md": "results/families-probe.md",
    "results/probe/faults.md": "results/faults-probe.md",
    "results/probe/llama-cpp.md": "results/llama-cpp.md",
    "results/cost/attention.md": "results/cost-attention.md",
    "results/challenge/README.md": "results/challenge.md",
    "results/copying/README.md": "results/copying.md",
    "results/interventions/README.md": "results/interventions.md",
    "results/extend-by-training/answers.md": "results/extend-by-training-answers.md",
    "benchmarks/gpu/README.md": "gpu-measurements.md",
}
REEXPORTS = ("data", "tasks")  # packages whose __init__.py imports names that their modules document


def target(link: str, source: Path, page: str) -> str:
    """Return the target of a link in site-src/; an empty string for files that are only in the repository.

    Args:
        link: The link, a path relative to the folder of its source.
        source: Page with the link, in docs/ or results/.
        page: Path of this page in site-src/.
    """
    path = Path(os.path.relpath(source.parent / link, ROOT))
    if path.as_posix() in OTHER_PAGES:
        site = OTHER_PAGES[path.as_posix()]
    elif path.parts[0] == "results" and path.name == "table.md":
        site = f"{path.parent}.md"
    elif path.parent == Path("results") and path.suffix == ".md":
        site = f"results/{path.stem.lower()}.md".replace("readme", "findings")
    elif path.parts[:2] == ("src", "kerple") and len(path.parts) == 3 and ROOT / path in PACKAGES:
        site = f"reference/{path.name}.md"
    elif path.parts[0] == "docs":
        site = str(path.relative_to("docs"))
    elif source.is_relative_to(DOCS) or path.suffix == ".png":
        return link
    else:
        return ""
    return os.path.relpath(site, Path(page).parent)


def stage(source: Path, page: str) -> None:
    """Write a page of docs/ or results/ to site-src/, with the targets of its links there."""

    def link(match: re.Match[str]) -> str:
        to = target(match["to"], source, page)
        return f"[{match['text']}]({to}{match['anchor']})" if to else match["text"]

    pattern = r"\[(?P<text>[^][]*)\]\((?P<to>[^)#:\s]+)(?P<anchor>[^)\s]*)\)"
    (SITE / page).write_text(re.sub(pattern, link, source.read_text(encoding="utf-8")), encoding="utf-8")


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
    for path in DOCS.rglob("*.md"):
        stage(path, str(path.relative_to(DOCS)))
    for path in (ROOT / "results").glob("*.md"):
        stage(path, target(path.name, path, "index.md"))
    for name, page in OTHER_PAGES.items():
        stage(ROOT / name, page)
    (SITE / "results/main").mkdir()
    shutil.copy(ROOT / "results/main/dilution.png", SITE / "results/main")
    shutil.copy(ROOT / "results/probe/llama-cpp.png", SITE / "results")
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
