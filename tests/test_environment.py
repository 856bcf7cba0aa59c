"""The three places that name versions agree: the lock, the conda environment, and the ranges of the package."""

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
LOCK = [
    Requirement(line)
    for line in (ROOT / "requirements.txt").read_text().splitlines()
    if line.strip() and not line.startswith("#")
]
UNRESOLVABLE = {"lightning-bolts", "attn_gym", "torchscale"}  # ask for packages that must not be installed


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_lock_is_exact_and_names_nothing_twice() -> None:
    assert all(re.fullmatch(r"==[^*]+", str(r.specifier)) for r in LOCK)
    assert len({canonical(r.name) for r in LOCK}) == len(LOCK)


def test_torch_is_the_pinned_build_and_torchvision_is_absent() -> None:
    pins = {canonical(r.name): str(r.specifier) for r in LOCK}
    assert pins["torch"] == "==2.13.0"
    assert "torchvision" not in pins
    assert "lightning" not in pins  # the package whose releases 2.6.2 and 2.6.3 were malware


def test_conda_environment_has_the_same_pins() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    pip = next(entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    assert {str(Requirement(line)) for line in pip} == {str(r) for r in LOCK if r.name not in UNRESOLVABLE}


def test_the_lock_satisfies_the_ranges_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = {canonical(r.name): next(iter(r.specifier)).version for r in LOCK}
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    wanted = [Requirement(line) for line in project["dependencies"]]
    assert wanted
    wanted += [r for r in map(Requirement, extras) if canonical(r.name) in pins]
    for requirement in wanted:
        assert requirement.specifier.contains(pins[canonical(requirement.name)]), requirement
