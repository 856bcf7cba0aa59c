"""One name, one meaning: no two modules give a class, a type or a constant the same name, except those in `SHARED`."""

import ast
import inspect
import pkgutil
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from pytorch_lightning import Callback

import kerple.callbacks

PACKAGE = Path(kerple.__file__).parent
# a needle hidden in a haystack: tasks.Needle trains on it, callbacks.Needle asks a model for it
SHARED = {"Needle", "T"}


def defined(path: Path) -> Iterator[str]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def test_public_names_are_defined_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for name in {name for name in defined(path) if not name.startswith("_")}:
            places[name].append(str(path.relative_to(PACKAGE)))
    twice = {name: sorted(files) for name, files in places.items() if len(files) > 1}
    assert {name: files for name, files in twice.items() if name not in SHARED} == {}
    assert twice.keys() == SHARED


def test_every_callback_is_in_the_list_of_its_package() -> None:
    modules = [
        import_module(f"kerple.callbacks.{module.name}") for module in pkgutil.iter_modules(kerple.callbacks.__path__)
    ]
    found = {
        name
        for module in modules
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Callback) and value.__module__ == module.__name__
    }
    assert found == set(kerple.callbacks.__all__)
