"""Reading of a checkpoint's configuration without running anything that it contains.

The parser imports the class that a ``class_path`` names and, where it expects a class or a function, any text; it also
opens what looks like a file. Therefore it never gets a checkpoint's configuration itself, but one that is built from
the signatures of the offered classes: an option that is not in a signature is refused, and a class is named by its own
name instead of the checkpoint's. Nothing is imported, except from packages that the user trusts.
"""

import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from inspect import isclass
from pathlib import Path
from typing import Any

import torch
import yaml
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch import Tensor

from kerple.base.compatibility import as_today
from kerple.base.errors import UserError
from kerple.base.seal import SEAL, seal
from kerple.base.signatures import ANYTHING, base_in, is_plain, options, takes_several

CONFIG_KEY = "config"
LARGEST_CONFIG = 1 << 20  # characters of a configuration; an ordinary one has about 6,000
NODES = 20_000  # values in a configuration; with aliases, a short text can have any number
OBJECTS = 2_000_000  # objects in a checkpoint, also by aliases; an ordinary one has some thousands


@dataclass(frozen=True)
class Offer:
    """The classes that a checkpoint may name.

    Args:
        classes: The offered classes for each base class that an option or a section expects.
        model: The class whose options the section ``model`` holds; for whole configurations.
        data: Base class of the class in the section ``data``; for whole configurations.
        callback: Base class of the classes in ``trainer.callbacks``; for whole configurations.
        renamed: The present modules of classes by their old modules.
        places: Options that say where files are written. They are left out, so that a checkpoint cannot decide it.
        trust: Packages whose own classes may be named too, because the user trusts them; None: nobody can say so.
    """

    classes: Mapping[type, tuple[type, ...]]
    model: type = object
    data: type = object
    callback: type = object
    renamed: Mapping[str, str] = field(default_factory=dict)
    places: frozenset[str] = frozenset()
    trust: tuple[str, ...] | None = None

    def trusts(self, module: str) -> bool:
        """Whether the user trusts the package of this module."""
        return module.split(".")[0] in (self.trust or ())


def read_config(path: str | Path, offer: Offer) -> dict[str, Any]:
    """Read the configuration in a checkpoint of `fit`, in a form that is safe to parse.

    Args:
        path: Path of a local checkpoint.
        offer: The classes that it may name.

    Returns:
        The sections ``model``, ``data`` and ``trainer`` (with ``precision``, ``callbacks`` and ``limit_test_batches``),
        and ``seed_everything``, ``experiment`` and ``auto_precision`` if it has them.

    Raises:
        UserError: If there is no such file, it is not a checkpoint of this project, or it names a class that is not
            offered.
    """
    path = Path(path)
    content = check(path)
    try:
        text = content[CONFIG_KEY]
        if len(text) > LARGEST_CONFIG:
            raise ValueError(f"a configuration of {len(text)} characters")
        config = yaml.safe_load(text)
        _count(config)
        config = as_today(config)
        sections = {name: config[name] for name in ("model", "data", "trainer")}
        sections["trainer"]["callbacks"]
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, yaml.YAMLError) as error:
        raise no_checkpoint(path, error) from error
    read = _Reading(f"ckpt_path: {path}", offer)
    trainer = sections["trainer"]
    callbacks = trainer["callbacks"] or []
    built = {
        "model": read.options(offer.model, sections["model"], "model"),
        "data": read.instance(offer.data, sections["data"], "data"),
        "trainer": {
            "callbacks": [
                read.instance(offer.callback, value, f"trainer.callbacks[{i}]")
                for i, value in enumerate(callbacks if isinstance(callbacks, list) else [callbacks])
            ]
        },
    }
    for key in ("precision", "limit_test_batches"):
        if key in trainer:
            built["trainer"][key] = read.scalar(trainer[key], f"trainer.{key}")
    for key in ("seed_everything", "experiment", "auto_precision"):
        if key in config:
            built[key] = read.scalar(config[key], key)
    return built


def named(given: Any, base: type, offer: Offer, where: str) -> dict[str, Any]:
    """``class_path`` and ``init_args`` of an offered class, in a form that is safe to parse.

    Args:
        given: The name of a class, or a mapping of ``class_path`` and ``init_args``, from any source.
        base: The base class that is expected.
        offer: The classes that may be named.
        where: Beginning of error messages.

    Raises:
        UserError: If the class is not offered.
    """
    return _Reading(where, offer).instance(base, given, "")


def check(path: str | Path, sealed: bool = True) -> dict[str, Any]:
    """Read a checkpoint, whose tensors stay on the disk, after checking that loading it runs nothing.

    This has to precede any other loading: FSDP's loader has an unpickler of its own, which runs code.

    Args:
        path: Path of a local checkpoint.
        sealed: Whether to read all of it and compare it with its checksum.

    Raises:
        UserError: If there is no such file, it holds anything but tensors and plain containers, or its content differs
            from the checksum.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"ckpt_path: got {path}, which is not a file; expected a checkpoint a run of `fit` has written")
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is no archive of torch.save, or was cut off")
        # mmap leaves the weights of a large model on the disk
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(content, dict):
            raise TypeError(f"it holds a {type(content).__name__}")
        _check_size(content)
        found = seal(content) if sealed and SEAL in content else None
    except Exception as error:  # reading a damaged pickle can raise any error
        raise no_checkpoint(path, error) from error
    if sealed and found is None:
        _warn(f"ckpt_path: {path} has no checksum, as those of earlier versions: damage and changes go unnoticed")
    elif sealed and content[SEAL] != found:
        raise UserError(
            f"ckpt_path: {path}: its checksum is not that of what it holds: it was damaged or changed after `fit` "
            "wrote it; take a copy of it, or another checkpoint"
        )
    return content


def no_checkpoint(path: str | Path, error: Exception) -> UserError:
    """The error that says that a file is no checkpoint of this project, and in one line why."""
    reason = (str(error).splitlines() or [""])[0][:200]
    return UserError(
        f"ckpt_path: {path} is not a checkpoint written by `python run.py fit` ({type(error).__name__}: {reason})"
    )


@rank_zero_only
def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)


def _check_size(content: Any) -> None:
    """Raise a ValueError if reading all of a checkpoint would take much more than is in its file."""
    waiting, seen = [content], 0
    while waiting:
        node = waiting.pop()
        seen += 1
        if seen > OBJECTS:
            raise ValueError(f"more than {OBJECTS} objects")
        if isinstance(node, dict):
            waiting += [*node.keys(), *node.values()]
        elif isinstance(node, list | tuple):
            waiting += node
        elif isinstance(node, Tensor) and (
            node.layout != torch.strided
            or node.is_meta
            or node.numel() * node.element_size() > node.untyped_storage().nbytes()
        ):
            raise ValueError(f"a tensor of {tuple(node.shape)}, whose numbers are not all in the file")


def _count(node: Any) -> None:
    """Raise a ValueError if there are more than `NODES` values; an alias counts each time it occurs."""
    waiting, seen = [node], 0
    while waiting:
        node = waiting.pop()
        seen += 1
        if seen > NODES:
            raise ValueError(f"a configuration of more than {NODES} values")
        waiting += node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()


@dataclass(frozen=True)
class _Reading:
    """Builds a safe configuration from that of one file; ``where`` is a place in it, for messages."""

    source: str
    offer: Offer

    def options(self, owner: type, given: Any, where: str) -> dict[str, Any]:
        """The options of a class, each of which is in its signature and has a value that its type allows."""
        if given is None:
            return {}
        if not isinstance(given, dict):
            raise self._refusal(where, f"got {_short(given)}, expected options by name")
        known = options(owner)
        built = {}
        for key, value in given.items():
            if key not in known:
                raise self._refusal(where, f"got {_short(key)}, which is no option of {owner.__name__}")
            if key not in self.offer.places:
                built[key] = self.value(value, known[key], f"{where}.{key}")
        return built

    def value(self, value: Any, kind: Any, where: str) -> Any:
        """A number, a text, or containers of them; or an offered class, if the type expects a class."""
        base = base_in(kind, self.offer.classes)
        if base is not None and isinstance(value, list) and takes_several(kind):
            return [self.instance(base, one, f"{where}[{i}]") for i, one in enumerate(value)]
        if base is not None and value is not None:
            return self.instance(base, value, where)
        self._plain(value, where, is_plain(kind), kind is ANYTHING)
        return value

    def scalar(self, value: Any, where: str) -> Any:
        if not isinstance(value, bool | int | float | str | None):
            raise self._refusal(where, f"got {_short(value)}, expected a number or a text")
        return value

    def instance(self, base: type, given: Any, where: str) -> dict[str, Any]:
        """``class_path`` and ``init_args`` of a class that is offered for this base class, or that is trusted."""
        given = {"class_path": given} if isinstance(given, str) else given
        if not isinstance(given, dict) or not {"class_path"} <= given.keys() <= {"class_path", "init_args"}:
            raise self._refusal(where, f"got {_short(given)}, expected class_path and init_args")
        found = self._named(base, given["class_path"], where)
        return {
            "class_path": f"{found.__module__}.{found.__qualname__}",
            "init_args": self.options(found, given.get("init_args"), where),
        }

    def _named(self, base: type, name: Any, where: str) -> type:
        if isinstance(name, str):
            module, _, last = name.rpartition(".")
            module = self.offer.renamed.get(module, module)
            for offered in self.offer.classes[base]:
                if last == offered.__name__ and (not module or _holds(module, offered)):
                    return offered
            if self.offer.trusts(name) and all(part.isidentifier() for part in name.split(".")):
                return self._trusted(base, module, last, where)
        offered_names = ", ".join(sorted(offered.__name__ for offered in self.offer.classes[base]))
        package = str(name).split(".")[0]
        foreign = self.offer.trust is not None and package.isidentifier() and "." in str(name)
        advice = f"; if you trust it, add --trust {package}" if foreign else ""
        raise self._refusal(where, f"names the class {_short(name)}, expected one of {offered_names}{advice}")

    def _trusted(self, base: type, module: str, name: str, where: str) -> type:
        """A class that a trusted package itself defines; classes that it only imports are not trusted."""
        try:
            found = vars(import_module(module))[name]
        except (ImportError, KeyError, ValueError) as error:
            raise self._refusal(where, f"names {module}.{name}, which cannot be imported ({error})") from error
        home = getattr(found, "__module__", "")
        if not (isclass(found) and issubclass(found, base)) or not self.offer.trusts(home) or not _holds(home, found):
            raise self._refusal(
                where, f"names {module}.{name}, expected a subclass of {base.__name__} that a trusted package defines"
            )
        return found

    def _plain(self, value: Any, where: str, texts: bool, untyped: bool) -> None:
        """Check for numbers, texts and containers of them; texts are refused that the parser might import or open."""
        if isinstance(value, dict):
            if "class_path" in value or not all(isinstance(key, str | int) for key in value):
                raise self._refusal(where, f"got {_short(value)}, expected no class")
            parts = list(value.values())
        elif isinstance(value, list):
            parts = value
        else:
            parts = []
            self.scalar(value, where)
            if isinstance(value, str) and not (texts or (untyped and "class_path" not in value)):
                raise self._refusal(where, f"got {_short(value)}, which could be imported or opened")
        for part in parts:
            self._plain(part, where, texts, untyped)

    def _refusal(self, where: str, what: str) -> UserError:
        return UserError(f"{self.source} {where}".rstrip() + f": {what}")


def _holds(module: str, found: type) -> bool:
    """Whether a module that is imported, or a package above the class's own, has the class under its name."""
    place, name = sys.modules.get(module), found.__qualname__
    above = found.__module__.startswith(f"{module}.")  # such a package may import the names of its modules on use
    return place is not None and (getattr(place, name, None) if above else vars(place).get(name)) is found


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
