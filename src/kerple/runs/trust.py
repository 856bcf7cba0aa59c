"""What a checkpoint says about the run that wrote it, read without running anything it contains."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

from kerple.errors import UserError
from kerple.runs.older import as_today

CONFIG_KEY = "config"
TRUSTED = ("kerple", "pytorch_lightning", "torch", "torchmetrics", "pl_bolts")
TEXT = {"corpus", "tokenizer", "directory", "text_field", "cache"}  # of this project's data: nothing is imported for it


def read_config(path: str | Path, trust: tuple[str, ...] = ()) -> dict[str, Any]:
    """The resolved configuration stored in a checkpoint by `python run.py fit`.

    Tensors are mapped to no memory at all; nothing is unpickled but plain containers and numbers.

    The parser that gets this configuration imports more than what stands behind ``class_path``: where it expects a
    class or a function, a text is an import path, a configuration written out, or a file of one. So every text in it
    is looked at.

    Args:
        path: A local checkpoint file.
        trust: Packages, beside this one and Lightning, whose classes the checkpoint may name.

    Raises:
        UserError: If there is no such file, it is no checkpoint of this project, or it names a class or function
            outside the trusted packages, or a file.
    """
    path = Path(path)
    content = check(path)
    try:
        config = as_today(yaml.safe_load(content[CONFIG_KEY]))
        found = list(_names(config))
    except (LookupError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as error:
        raise _no_checkpoint(path, error) from error
    allowed = (*TRUSTED, *filter(None, trust))
    for name in found:
        if name.split(".")[0] not in allowed:
            raise UserError(
                f"ckpt_path: {path} names the class {name}, expected one from {', '.join(allowed)}; "
                f"if you trust it, add --trust {name.split('.')[0]}"
            )
    return config


def check(path: str | Path) -> Any:
    """A checkpoint's content without its tensors' values, as sure to run nothing when it is loaded for good.

    FSDP's way of loading a file has an unpickler of its own, which would run what it is told to; so this comes first.

    Args:
        path: A local checkpoint file.

    Raises:
        UserError: If there is no such file, or it holds anything but tensors and plain containers.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"ckpt_path: got {path}, which is not a file; expected a checkpoint a run of `fit` has written")
    try:
        # Lightning's own loader knows no "meta"; mmap keeps the weights of a large model on disk
        return torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except Exception as error:  # a damaged pickle raises whatever its reader stumbles over
        raise _no_checkpoint(path, error) from error


def _no_checkpoint(path: Path, error: Exception) -> UserError:
    reason = (str(error).splitlines() or [""])[0][:200]
    return UserError(
        f"ckpt_path: {path} is not a checkpoint written by `python run.py fit` ({type(error).__name__}: {reason})"
    )


def _names(config: dict[str, Any]) -> Iterator[str]:
    """What a run of this configuration may import. A TypeError if it is none."""
    model, data, trainer = (config[section] for section in ("model", "data", "trainer"))
    if not all(isinstance(section, dict) for section in (model, data, trainer)):
        raise TypeError("model, data and trainer are no mappings")
    init_args = data.get("init_args") or {}
    if str(data.get("class_path")).startswith("kerple.") and isinstance(init_args, dict):
        data = {"init_args": {k: v for k, v in init_args.items() if not (k in TEXT and isinstance(v, str))}}
    yield from _class_paths(config)
    for part in (model, data, trainer.get("callbacks")):
        yield from _texts(part)


def names(config: Any) -> Iterator[str]:
    """What a parser may import for a part of a configuration: class paths, import paths, files."""
    yield from _class_paths(config)
    yield from _texts(config)


def _class_paths(node: Any) -> Iterator[str]:
    if isinstance(node, dict) and "class_path" in node:
        yield str(node["class_path"])
    for value in _inside(node):
        yield from _class_paths(value)


def _texts(node: Any) -> Iterator[str]:
    """Texts that are import paths or files, in configurations written out as text too."""
    if isinstance(node, str):
        if ("." in node and all(part.isidentifier() for part in node.split("."))) or os.path.isfile(node):
            yield node
        try:
            node = yaml.safe_load(node)
        except yaml.YAMLError:  # the parser leaves it a text, then
            return
        yield from _class_paths(node)
    for value in _inside(node):
        yield from _texts(value)


def _inside(node: Any) -> Iterable[Any]:
    return node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
