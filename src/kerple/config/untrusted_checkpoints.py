"""Reading of checkpoints and their configurations, without running any code that they contain.

A checkpoint is loaded by `torch.load(weights_only=True)`, which accepts tensors and plain Python values. Its
configuration is a nested mapping, from which `test` and other commands build the model and its data with jsonargparse.
jsonargparse imports any class that a ``class_path`` names. For an option whose type is a class or a function, it also
imports the name in a string, or opens the string as a file. It therefore gets a copy of the configuration, in which

- every ``class_path`` is the full name of a class from a fixed set, or of a class in a package that the user trusts,
- every option is one that the class has, and
- the value of an option is a string only if all types of the option are in `PLAIN`, or a Literal allows this string.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from inspect import isclass
from os import PathLike
from pathlib import Path
from pkgutil import resolve_name
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import torch
from jsonargparse._parameter_resolvers import get_signature_parameters

from kerple.base.errors import UserError, describe, machine_error, require, unknown
from kerple.config.options import listed
from kerple.config.user_code_digests import needs_trust

CONFIG = "config"  # key of the configuration in a checkpoint
# types of options whose strings jsonargparse neither imports nor opens
PLAIN = {int, float, bool, str, complex, type(None), Path, PathLike, timedelta}
CONTAINERS = {list, tuple, dict, set, frozenset, Collection, Iterable, Mapping, Sequence, Union, UnionType}
TRAINING_ONLY = ("pytorch_lightning", "lightning", "pl_bolts")  # callbacks of these packages are left out of a test
FOLDERS = ("cache", "cache_gb", "keys")  # options for folders to write to, which a checkpoint must not determine
# options in checkpoints that a test does not need; the last is a former option
REMOVED = ("sections", "prepare_engine")


def load(path: str | Path, device: str = "cpu") -> dict[str, Any]:
    """Load a checkpoint. Its tensors are memory-mapped, and so are read from the disk when they are used.

    Every checkpoint must be loaded by this function before Lightning loads it. A sharded checkpoint is a folder, whose
    files Lightning would unpickle, and pickles can run code. This function refuses folders.

    Args:
        path: Path of a local file.
        device: Device of the tensors; with ``meta`` their values are not read.

    Raises:
        UserError: If the file is missing, or has values other than tensors, numbers, strings and containers of these.
    """
    if not os.path.isfile(path):  # a missing permission is no error in os.path
        raise UserError(f"ckpt_path: got {path}, which is not a file; give the path of a checkpoint written by `fit`")
    unicode = str(path).encode(errors="ignore").decode() == str(path)  # torch cannot memory-map other paths
    try:
        content = torch.load(path, map_location=device, weights_only=True, mmap=unicode)
        if not isinstance(content, dict):
            raise TypeError(f"it contains a {type(content).__name__}")
    except Exception as error:  # torch can raise any error for a damaged file
        if machine_error(error):
            raise
        raise not_a_checkpoint(path, error) from error
    return content


def not_a_checkpoint(path: str | Path, error: Exception) -> UserError:
    """Return the error about a file that is not a checkpoint of this project, with the reason."""
    return UserError(f"ckpt_path: {path} is not a checkpoint written by `fit` ({describe(error):.250}); use another")


@dataclass(frozen=True)
class Classes:
    """The classes that a file may name.

    Args:
        classes: Classes that every file may name.
        trusted: Packages, URLs and models that the user trusts. A file may also name classes of these packages,
            addresses below these URLs, and these models of the Hugging Face hub.
        model: Class whose options are the section ``model`` of a configuration.
    """

    classes: Iterable[type]
    trusted: tuple[str, ...] = ()
    model: type = object
    by_name: dict[tuple[str, str], type] = field(init=False, repr=False)  # by package and name

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {(_package(c.__module__), c.__name__): c for c in self.classes})

    def config(self, path: str | Path) -> dict[str, Any]:
        """Return the configuration in a checkpoint, reduced to values that are safe to parse.

        Args:
            path: Path of a checkpoint that `fit` has written.

        Returns:
            The sections ``model`` and ``data``, ``seed_everything`` and ``experiment``. The section ``trainer`` has
            only the precision, ``limit_test_batches``, and the callbacks of other packages than `TRAINING_ONLY`.

        Raises:
            UserError: If the file is not a checkpoint of `fit`, or names a class that is not accepted.
        """
        content = load(path, "meta")
        try:
            config = content[CONFIG]
            callbacks = listed(config["trainer"]["callbacks"])
            measures = [self.instance(c, "trainer.callbacks") for c in callbacks if not _is_from_library(c)]
            safe_config = self._plain(config, "seed_everything", "experiment") | {
                "model": self.options(self.model, config["model"], "model"),
                "data": self.instance(config["data"], "data"),
                "trainer": self._plain(config["trainer"], "precision", "limit_test_batches") | {"callbacks": measures},
            }
        except UserError as error:
            advice = "" if "--trust" in str(error) else "; use another checkpoint, or the kerple version that wrote it"
            raise UserError(f"ckpt_path: {path}: {error}{advice}") from error
        except (LookupError, TypeError, AttributeError, RecursionError) as error:
            raise not_a_checkpoint(path, error) from error
        return safe_config

    def _plain(self, section: dict[str, Any], *names: str) -> dict[str, Any]:
        """Return the options with these names in a section. Their values must be numbers or strings."""
        return {name: self.value(section[name], str, name) for name in names if name in section}

    def instance(self, node: Any, option: str) -> dict[str, Any]:
        """Return ``class_path`` and ``init_args`` of an accepted class.

        Args:
            node: Name of the class, or a mapping with ``class_path`` and possibly ``init_args``.
            option: Name of the option, for messages.

        Raises:
            UserError: If the class is not accepted, or ``init_args`` has an option or a value that is not accepted.
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
        """Return the class with this name. Only modules of trusted packages are imported to find it."""
        module, _, last = str(name).rpartition(".")
        package = _package(module or "kerple")
        if (package, last) in self.by_name:
            return self.by_name[package, last]
        if package not in self.trusted:
            advice = f"if you trust its code, add --trust {package[:100]} (several packages: a,b)"
            raise UserError(f"{option}: names the class {name!s:.100}, expected a class of this project; {advice}")
        try:
            kind = resolve_name(str(name))
        except (ImportError, AttributeError, ValueError) as error:
            given = f"names {name!s:.100}, which cannot be imported ({error})"
            raise UserError(f"{option}: {given}; install the version of {package} that defines it") from error
        if not isclass(kind) or _package(kind.__module__) not in self.trusted:  # not a class, or another package's
            expected = f"expected a class that {package} itself defines"
            raise UserError(f"{option}: names {name!s:.100}, {expected}; add --trust for the package that defines it")
        return kind

    def options(self, owner: type, node: Any, option: str) -> dict[str, Any]:
        """Return the mapping ``node`` of a class's options, without `FOLDERS` and `REMOVED`. Refuse unknown options."""
        if not isinstance(node, dict):
            raise UserError(f"{option}: got {node!r:.100}, expected a mapping of option names to values")
        types = _types(owner)
        node = {name: node[name] for name in node if name not in FOLDERS + REMOVED}
        for name in node:
            if name not in types:
                raise unknown(option, f"{name!s:.100}", types)
        return {name: self.value(value, types[name], f"{option}.{name}") for name, value in node.items()}

    def value(self, node: Any, annotation: Any, option: str) -> Any:
        """Return a value that an option of this type may have.

        Args:
            node: The value: a number, a string, the name of a class, or a list or mapping of these.
            annotation: Type of the option. If it allows classes or functions, a string must name an accepted class.
            option: Name of the option, for messages.

        Raises:
            UserError: If the value contains a class or an address that is not accepted, or a value of another type.
        """
        plain = _is_plain(node, annotation)
        if isinstance(node, list | tuple):
            return [self.value(item, annotation, option) for item in node]
        if isinstance(node, dict) and "class_path" not in node and (plain or get_origin(annotation) is Mapping):
            return {self.value(k, str, option): self.value(v, annotation, option) for k, v in node.items()}
        if isinstance(node, dict) or (isinstance(node, str) and not plain):
            return self.instance(node, option)
        if needs_trust(text := str(node), option) and not self._is_trusted(text):
            raise UserError(f"{option}: names {node!r:.99}, which is not read without consent; add --trust {text:.99}")
        valid = type(node) in (bool, int, float, str, type(None))
        require(valid, option, f"{node!r:.100}", "a number, a string, true, false or null")
        return node

    def _is_trusted(self, address: str) -> bool:
        """Return whether the user trusts an address: its name, or the URL of a folder above it."""
        folders = tuple(f"{url.rstrip('/')}/" for url in self.trusted if "://" in url)
        return address in self.trusted or f"{address}/".startswith(folders)


def _is_plain(node: Any, annotation: Any) -> bool:
    """Return whether the parser neither imports nor opens a value: no type of its option is one of objects."""
    leaves = list(_leaves(annotation))
    return node in leaves or all(leaf in PLAIN or type(leaf) in PLAIN for leaf in leaves)  # a Literal has values


@cache  # reads the source of the class, which takes milliseconds
def _types(owner: type) -> dict[str, Any]:
    """Return the type of each option of a class, including options that its `__init__` passes on to another class."""
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
