"""Digests of the source code of the user's classes, which show that a class has changed."""

import ast
import hashlib
import inspect
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import kerple

SOURCE_DIGESTS = "sources"  # key of the digests in a checkpoint
RECORDED_PACKAGES = ("kerple", "pytorch_lightning", "torch")  # a run records their versions, so they need no digest
DEFINITIONS = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def own_classes(config: dict[str, Any]) -> list[str]:
    """Return the import paths of the user's classes in a configuration with dotted keys, such as ``model.dim``."""
    named = {str(value) for key, value in config.items() if key.endswith("class_path")}
    return sorted(name for name in named if "." in name and name.partition(".")[0] not in RECORDED_PACKAGES)


def trust_option(config: dict[str, Any]) -> list[str]:
    """Return the option ``--trust`` with which a test may use the user's classes and URLs; empty without any.

    Args:
        config: Configuration of a fit that the user has started, with dotted keys.
    """
    packages = {name.partition(".")[0] for name in own_classes(config)}
    values = {value for key, value in config.items() if key.startswith("data.") and isinstance(value, str)}
    values |= {key.partition(".mixture.")[2] for key in config}  # the keys of a mixture are folders
    trusted = sorted(packages | {value for value in values if "://" in value.removeprefix("file://")})
    return [f"--trust={','.join(trusted)}"] if trusted else []


def source_digests(config: dict[str, Any]) -> dict[str, str]:
    """Return a sha256 for each of the user's classes, by import path.

    A digest covers the source code of the class and its base classes. The configuration has dotted keys, such as
    ``model.position.class_path``.

    The source code of a class is its definition and all definitions in its module that it uses, directly or indirectly.
    Comments, formatting, the rest of the module and imported modules are not part of it.
    """
    digests = {}
    for name in own_classes(config):
        module, _, last = name.rpartition(".")
        source = "\n".join(map(_source, getattr(import_module(module), last).__mro__))
        digests[name] = hashlib.sha256(source.encode()).hexdigest()
    return digests


def _source(kind: type) -> str:
    """Return the definitions that belong to a class; "" for classes of `RECORDED_PACKAGES` and the standard library."""
    if kind.__module__.partition(".")[0] in {*RECORDED_PACKAGES, *sys.stdlib_module_names}:
        return ""
    definitions: dict[str, list[ast.stmt]] = {}
    for statement in ast.parse(inspect.getsource(sys.modules[kind.__module__])).body:
        # of another statement, such as `try`, all names, which include those that it defines
        parts: list[ast.AST] = [statement] if isinstance(statement, DEFINITIONS) else [*ast.walk(statement)]
        named = [part.id for part in parts if isinstance(part, ast.Name)]
        for name in named + [part.name for part in parts if isinstance(part, DEFINITIONS)]:
            definitions.setdefault(name, []).append(statement)
    waiting = [kind.__name__]
    used = dict[str, str]()
    while waiting:
        name = waiting.pop()
        if name in definitions and name not in used:
            used[name] = "\n".join(map(ast.unparse, definitions[name]))
            nodes = (node for statement in definitions[name] for node in ast.walk(statement))
            waiting += [node.id for node in nodes if isinstance(node, ast.Name)]
    return "\n".join(used[name] for name in sorted(used))


def package_digest() -> str:
    """Return the sha256 of the source files of this package and their paths."""
    root = Path(kerple.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
