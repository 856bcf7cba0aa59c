"""What a checkpoint says about the run that wrote it, read without running anything it contains.

The parser imports what stands behind a ``class_path`` and, where it expects a class or a function, behind any text; it
opens what looks like a file. So it never gets a checkpoint's configuration as it is. What it gets is built anew, from
the signatures of the classes that are offered: an option that no signature has is refused, and a class goes by its own
name, not by the checkpoint's for it. Nothing is imported, but from packages the user trusts.
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

from kerple.errors import UserError
from kerple.runs.older import as_today
from kerple.runs.seal import SEAL, seal
from kerple.runs.signatures import ANYTHING, base_in, is_plain, options, takes_several

CONFIG_KEY = "config"
LARGEST_CONFIG = 1 << 20  # characters of a configuration; that of a run here has some 6,000
NODES = 20_000  # values in it: aliases make a short text an endless one


@dataclass(frozen=True)
class Offer:
    """What a checkpoint may name.

    Args:
        classes: Base class -> the classes offered where an option or a section asks for one.
        model: The class whose options the section ``model`` holds; for whole configurations.
        data: Base class of what the section ``data`` names; for whole configurations.
        callback: Base class of what ``trainer.callbacks`` lists; for whole configurations.
        renamed: Modules of earlier versions -> where their classes are now.
        places: Options that say where to write; they are left out, so that nothing is written where a checkpoint says.
        trust: Packages whose own classes may be named too, by the user's word.
    """

    classes: Mapping[type, tuple[type, ...]]
    model: type = object
    data: type = object
    callback: type = object
    renamed: Mapping[str, str] = field(default_factory=dict)
    places: frozenset[str] = frozenset()
    trust: tuple[str, ...] = ()


def read_config(path: str | Path, offer: Offer) -> dict[str, Any]:
    """What a checkpoint of `python run.py fit` says of its run, safe to be given to the parser.

    Args:
        path: A local checkpoint file.
        offer: What it may name.

    Returns:
        The keys ``model``, ``data`` and ``trainer``, this with ``precision``, ``callbacks`` and ``limit_test_batches``,
        and, where they are there, ``seed_everything``, ``experiment`` and ``auto_precision``.

    Raises:
        UserError: If there is no such file, it is no checkpoint of this project, or it names anything that is not
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
        raise _no_checkpoint(path, error) from error
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
    """``class_path`` and ``init_args`` of a class that is offered for a base class, safe to be given to the parser.

    Args:
        given: A name, or a mapping of the two, from wherever.
        base: What the class has to be a subclass of.
        offer: What may be named.
        where: What messages begin with.

    Raises:
        UserError: If it names anything that is not offered.
    """
    return _Reading(where, offer).instance(base, given, "")


def check(path: str | Path, sealed: bool = True) -> dict[str, Any]:
    """A checkpoint's content, its tensors left on the disk, as sure to run nothing when it is loaded for good.

    FSDP's way of loading a file has an unpickler of its own, which would run what it is told to; so this comes first.

    Args:
        path: A local checkpoint file.
        sealed: Read all of it, and compare it with the checksum it was sealed with.

    Raises:
        UserError: If there is no such file, it holds anything but tensors and plain containers, or something in it is
            not what was written.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"ckpt_path: got {path}, which is not a file; expected a checkpoint a run of `fit` has written")
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is no archive of torch.save, or was cut off")
        # mmap keeps the weights of a large model on the disk
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(content, dict):
            raise TypeError(f"it holds a {type(content).__name__}")
    except Exception as error:  # a damaged pickle raises whatever its reader stumbles over
        raise _no_checkpoint(path, error) from error
    if sealed and SEAL not in content:
        _warn(f"ckpt_path: {path} has no checksum, as those of earlier versions: damage and changes go unnoticed")
    elif sealed and content[SEAL] != seal(content):
        raise UserError(
            f"ckpt_path: {path}: its checksum is not that of what it holds: it was damaged or changed after `fit` "
            "wrote it; take a copy of it, or another checkpoint"
        )
    return content


@rank_zero_only
def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)


def _no_checkpoint(path: Path, error: Exception) -> UserError:
    reason = (str(error).splitlines() or [""])[0][:200]
    return UserError(
        f"ckpt_path: {path} is not a checkpoint written by `python run.py fit` ({type(error).__name__}: {reason})"
    )


def _count(node: Any) -> None:
    """A ValueError if there is more in it than in any configuration; an alias counts each time it is met."""
    waiting, seen = [node], 0
    while waiting:
        node = waiting.pop()
        seen += 1
        if seen > NODES:
            raise ValueError(f"a configuration of more than {NODES} values")
        waiting += node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()


@dataclass(frozen=True)
class _Reading:
    """Builds anew what one file says; ``where`` is the place in it, for messages."""

    source: str
    offer: Offer

    def options(self, owner: type, given: Any, where: str) -> dict[str, Any]:
        """The options given to a class, each one of its signature and of a value that its type allows."""
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
        """A number or text, containers of those, or, where the type asks for a class, one that is offered."""
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
        """``class_path`` and ``init_args`` of a class that is offered for this base class, or trusted."""
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
            if name.split(".")[0] in self.offer.trust and all(part.isidentifier() for part in name.split(".")):
                return self._trusted(base, module, last, where)
        offered_names = ", ".join(sorted(offered.__name__ for offered in self.offer.classes[base]))
        package = str(name).split(".")[0]
        advice = f"; if you trust it, add --trust {package}" if package.isidentifier() and "." in str(name) else ""
        raise self._refusal(where, f"names the class {_short(name)}, expected one of {offered_names}{advice}")

    def _trusted(self, base: type, module: str, name: str, where: str) -> type:
        """A class that a trusted package itself defines; what it has merely imported is not its word."""
        try:
            found = vars(import_module(module))[name]
        except (ImportError, KeyError, ValueError) as error:
            raise self._refusal(where, f"names {module}.{name}, which cannot be imported ({error})") from error
        home = getattr(found, "__module__", "")
        if (
            not (isclass(found) and issubclass(found, base))
            or home.split(".")[0] not in self.offer.trust
            or not _holds(home, found)
        ):
            raise self._refusal(
                where, f"names {module}.{name}, expected a subclass of {base.__name__} that a trusted package defines"
            )
        return found

    def _plain(self, value: Any, where: str, texts: bool, untyped: bool) -> None:
        """Numbers and texts, and lists and mappings of those; no text where the parser might import or open it."""
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
    """Whether a module that is already imported, or a package above the class's own, has it under its name."""
    place, name = sys.modules.get(module), found.__qualname__
    above = found.__module__.startswith(f"{module}.")  # a package may look the names of its modules up when asked
    return place is not None and (getattr(place, name, None) if above else vars(place).get(name)) is found


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
