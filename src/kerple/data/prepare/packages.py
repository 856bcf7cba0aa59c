"""Corpora of installed source code: the standard library, its modules, and the packages that this project requires."""

import random
import sysconfig
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

from kerple.base.errors import UserError
from kerple.data.prepare.sources import TextFiles

STANDARD_LIBRARY = "stdlib"
LIBRARY_MODULES = "modules"
PACKAGES = "packages"
FILE_ORDER = 0  # seed of the shuffle of files


def standard_library() -> TextFiles:
    """The .py files of the running Python's standard library: about 30 MB of source code that every machine has.

    The files are sorted, then shuffled in the same way everywhere, so that files of one package are not neighbours in
    the token stream.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    beside = {"site-packages", "dist-packages", "__pycache__"}
    paths = sorted(p for p in root.rglob("*.py") if p.is_file() and not beside & set(p.relative_to(root).parts))
    random.Random(FILE_ORDER).shuffle(paths)
    return TextFiles(STANDARD_LIBRARY, [str(p) for p in paths], [p.stat().st_size for p in paths])


def top_modules() -> TextFiles:
    """The modules at the top of the standard library (`argparse.py`) in alphabetical order, about 5 MB: a text whose
    beginning does not depend on hashes or seeds."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(root.glob("*.py"))
    return TextFiles(LIBRARY_MODULES, [str(p) for p in paths], [p.stat().st_size for p in paths])


def installed_packages(project: str = "kerple") -> TextFiles:
    """The .py files of the standard library and of all packages that a project requires; each file is a document.

    They are about 210 MB, two thirds of which are in files of more than 8,000 tokens. Other packages in the environment
    do not change the corpus, but the versions of the required ones do.

    Args:
        project: Name of the installed project.

    Raises:
        UserError: The project is not installed, so that its requirements are unknown.
    """
    found = _required(project)
    paths = [Path(path) for path in standard_library().paths]
    for name in sorted(found.keys() - {project}):
        files = sorted(Path(str(file.locate())) for file in found[name].files or () if file.suffix == ".py")
        paths += [path for path in files if path.is_file()]
    random.Random(FILE_ORDER).shuffle(paths)
    return TextFiles(PACKAGES, [str(p) for p in paths], [p.stat().st_size for p in paths])


def _required(project: str) -> dict[str, Distribution]:
    """The installed packages that a project requires, directly or through others, and the project itself, by name.

    Requirements of extras are left out, and so are packages that are not installed.
    """
    found: dict[str, Distribution] = {}
    wanted = [project]
    while wanted:
        try:
            package = distribution(wanted.pop())
        except PackageNotFoundError:
            continue
        if package.name not in found:
            found[package.name] = package
            needs = [Requirement(line) for line in package.requires or ()]
            wanted += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    if not found:
        raise UserError(
            f"corpus: got {PACKAGES!r}, which asks the installed project for its requirements, and {project} is not "
            "installed; run `pip install --no-deps -e .`, or choose the corpus stdlib"
        )
    return found
