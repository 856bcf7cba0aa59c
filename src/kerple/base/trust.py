"""Reading of checkpoints and their configurations, without running any code that they contain.

A checkpoint is loaded by `torch.load(weights_only=True)`: tensors and plain containers. Its configuration is a nested
mapping of numbers and texts, from which `test` and other commands build the model and its data with jsonargparse.
jsonargparse imports any class that a ``class_path`` names. Where it expects a class or a function, it also imports a
text, or opens it as a file. It therefore gets a copy of the configuration, in which

- a class is one of a fixed set of classes that are already imported, under its own full name,
- every option is one that the class has, and
- the value of an option is a text only if the type of the option consists of texts and numbers.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from importlib import import_module
from inspect import isclass
from os import PathLike
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import torch
from jsonargparse._parameter_resolvers import get_signature_parameters

from kerple.base.errors import UserError

CONFIG = "config"  # key of the configuration in a checkpoint
PLAIN = {int, float, bool, str, complex, type(None), Path, PathLike, timedelta}
CONTAINERS = {list, tuple, dict, set, frozenset, Collection, Iterable, Mapping, Sequence, Union, UnionType}
TRAINING_ONLY = ("pytorch_lightning", "lightning", "pl_bolts")  # callbacks of these packages are left out of a test
FOLDERS = ("cache", "keys")  # options that name folders to write to
REMOVED = ("mixture", "sections", "prepare_engine")  # options in earlier checkpoints, which a test does not need


def load(path: str | Path, device: str = "cpu") -> dict[str, Any]:
    """Load a checkpoint. Its tensors stay on the disk until they are used.

    Every checkpoint has to be loaded by this function first. Lightning's loaders of sharded checkpoints unpickle, and
    so could run code.

    Args:
        path: Path of a local file.
        device: Device of the tensors; ``meta`` does not read their values.

    Raises:
        UserError: The file is missing, or has values other than tensors, numbers, texts and containers of these.
    """
    if not Path(path).is_file():
        raise UserError(f"ckpt_path: got {path}, which is not a file; expected a checkpoint written by `fit`")
    unicode = str(path).encode(errors="ignore").decode() == str(path)  # torch cannot memory-map other paths
    try:
        content = torch.load(path, map_location=device, weights_only=True, mmap=unicode)
        if not isinstance(content, dict):
            raise TypeError(f"it holds a {type(content).__name__}")
    except Exception as error:  # torch can raise any error for a damaged file
        raise not_a_checkpoint(path, error) from error
    return content


def not_a_checkpoint(path: str | Path, error: Exception) -> UserError:
    """The error about a file that is not a checkpoint of this project, with the reason."""
    reason = (str(error).splitlines() or [""])[0][:200]
    return UserError(f"ckpt_path: {path} is not a checkpoint written by `fit` ({type(error).__name__}: {reason})")


@dataclass(frozen=True)
class Classes:
    """The classes that a file may name.

    Args:
        classes: Classes that every file may name.
        trusted: Packages whose classes a file may also name, and URLs that it may read, as the user allows.
        model: Class whose options are the section ``model`` of a configuration.
    """

    classes: Iterable[type]
    trusted: tuple[str, ...] = ()
    model: type = object
    by_name: dict[tuple[str, str], type] = field(init=False, repr=False)  # by package and name

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {(_package(c.__module__), c.__name__): c for c in self.classes})

    def config(self, path: str | Path) -> dict[str, Any]:
        """The configuration in a checkpoint, reduced to values that are safe to parse.

        Args:
            path: Path of a checkpoint that `fit` has written.

        Returns:
            The sections ``model`` and ``data``, the seed and the experiment. The section ``trainer`` has only the
            callbacks that are not of `TRAINING_ONLY`, the precision and ``limit_test_batches``.

        Raises:
            UserError: The file is not a checkpoint of `fit`, or names a class that is not accepted.
        """
        content = load(path, "meta")
        try:
            config = content[CONFIG]
            callbacks = config["trainer"]["callbacks"] or []
            callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
            measures = [self.instance(c, "trainer.callbacks") for c in callbacks if not _is_from_library(c)]
            safe_config = self._plain(config, "seed_everything", "experiment") | {
                "model": self.options(self.model, config["model"], "model"),
                "data": self.instance(config["data"], "data"),
                "trainer": self._plain(config["trainer"], "precision", "limit_test_batches") | {"callbacks": measures},
            }
        except UserError as error:
            raise UserError(f"ckpt_path: {path}: {error}") from error
        except (LookupError, TypeError, AttributeError, RecursionError) as error:
            raise not_a_checkpoint(path, error) from error
        return safe_config

    def _plain(self, section: dict[str, Any], *names: str) -> dict[str, Any]:
        """The options of these names in a section, which must be numbers or texts."""
        return {name: self.value(section[name], str, name) for name in names if name in section}

    def instance(self, node: Any, option: str) -> dict[str, Any]:
        """``class_path`` and ``init_args`` of an accepted class.

        Args:
            node: Its name, or a mapping of ``class_path`` and ``init_args``.
            option: Name of the option, for messages.

        Raises:
            UserError: The class is not accepted, or has no such option.
        """
        node = {"class_path": node} if isinstance(node, str) else node
        if not isinstance(node, dict) or not {"class_path"} <= node.keys() <= {"class_path", "init_args"}:
            raise UserError(f"{option}: got {node!r:.100}, expected class_path and init_args")
        kind = self.find(node["class_path"], option)
        return {
            "class_path": f"{kind.__module__}.{kind.__qualname__}",
            "init_args": self.options(kind, node.get("init_args") or {}, f"{option}.{kind.__name__}"),
        }

    def find(self, name: Any, option: str) -> type:
        """The class of this name. To find it, only modules of trusted packages are imported."""
        module, _, last = str(name).rpartition(".")
        package = _package(module or "kerple")
        if (package, last) in self.by_name:
            return self.by_name[package, last]
        if package not in self.trusted:
            where = f"not one of this project; if you trust its code, add --trust {package[:100]} (several: a,b)"
            raise UserError(f"{option}: names the class {name!s:.100}, {where}")
        try:
            kind = getattr(import_module(module), last)
        except (ImportError, AttributeError) as error:
            raise UserError(f"{option}: names {name!s:.100}, which cannot be imported ({error})") from error
        if not isclass(kind) or _package(kind.__module__) not in self.trusted:  # not one that the package imports
            raise UserError(f"{option}: names {name!s:.100}, expected a class that {package} defines")
        return kind

    def options(self, owner: type, node: Any, option: str) -> dict[str, Any]:
        """The options of a class, without those of `FOLDERS` and `REMOVED`."""
        if not isinstance(node, dict):
            raise UserError(f"{option}: got {node!r:.100}, expected a mapping of option names to values")
        types, node = _types(owner), {name: node[name] for name in node if name not in FOLDERS + REMOVED}
        if unknown := [name for name in node if name not in types]:
            raise UserError(f"{option}: got {unknown[0]!s:.100}, which is not an option of {owner.__name__}")
        return {name: self.value(value, types[name], f"{option}.{name}") for name, value in node.items()}

    def value(self, node: Any, annotation: Any, option: str) -> Any:
        """A value for an option of this type: a number, a text, an accepted class, or a list or mapping of these."""
        leaves = list(_leaves(annotation))
        plain = node in leaves or all(leaf in PLAIN or type(leaf) in PLAIN for leaf in leaves)
        if isinstance(node, list | tuple):
            return [self.value(item, annotation, option) for item in node]
        if isinstance(node, dict) and "class_path" not in node and (plain or get_origin(annotation) is Mapping):
            return {self.value(k, str, option): self.value(v, annotation, option) for k, v in node.items()}
        if isinstance(node, dict) or (isinstance(node, str) and not plain):  # the parser could import or open a text
            return self.instance(node, option)
        remote = isinstance(node, str) and "://" in node.removeprefix("file://")
        if remote and not any("://" in url and node.startswith(url) for url in self.trusted):
            raise UserError(f"{option}: names {node!r:.200}; if you trust that address, add --trust {node:.200}")
        if type(node) not in (bool, int, float, str, type(None)):
            raise UserError(f"{option}: got a {type(node).__name__}, expected a number or a text")
        return node


@cache  # reads the source of the class, which takes milliseconds
def _types(owner: type) -> dict[str, Any]:
    """Names and types of the options of a class, including those that its `__init__` passes on to another class."""
    return {option.name: option.annotation for option in get_signature_parameters(owner)}


def _package(module: str) -> str:
    return module.partition(".")[0]


def _is_from_library(callback: Any) -> bool:
    return isinstance(callback, dict) and _package(str(callback.get("class_path"))) in TRAINING_ONLY


def _leaves(annotation: Any) -> Iterator[Any]:
    """Yield the types of which an annotation consists, and the values that a Literal allows."""
    arguments, origin = get_args(annotation), get_origin(annotation)
    if origin is Literal:
        yield from arguments
    elif not arguments:
        yield annotation
    else:
        if origin not in CONTAINERS:
            yield origin
        for argument in arguments:
            yield from _leaves(argument) if argument is not ... else ()
