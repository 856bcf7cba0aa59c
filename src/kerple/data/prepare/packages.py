"""A built-in corpus that is larger than the standard library: the source of the packages this project runs on."""

import random
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

from kerple.data.prepare.corpora import TextFiles, standard_library
from kerple.errors import UserError

PACKAGES = "packages"


def installed_packages(project: str = "kerple", seed: int = 0) -> TextFiles:
    """The standard library and the .py files of all packages that a project requires, whole files as documents: about
    210 MB, two thirds of them in files of more than 8,000 tokens.

    Only required packages count, so what else lies in the environment changes nothing; the versions do.

    Raises:
        UserError: The project is not installed, so that nobody knows what it requires.
    """
    found = _required(project)
    paths = [Path(path) for path in standard_library().paths]
    for name in sorted(found.keys() - {project}):
        files = sorted(Path(str(file.locate())) for file in found[name].files or () if file.suffix == ".py")
        paths += [path for path in files if path.is_file()]
    random.Random(seed).shuffle(paths)
    return TextFiles(PACKAGES, [str(p) for p in paths], [p.stat().st_size for p in paths])


def _required(project: str) -> dict[str, Distribution]:
    """The installed packages among a project's requirements, theirs, and so on, by name; the project is one of them.

    Extras are left out, and so is what is required and not installed.
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
