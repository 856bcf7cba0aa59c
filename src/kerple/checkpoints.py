"""What a checkpoint says about the run that wrote it, read without running anything it contains."""

import pickle
from pathlib import Path
from typing import Any

import torch
import yaml

CONFIG_KEY = "config"
TRUSTED = ("kerple", "pytorch_lightning", "torch", "torchmetrics", "pl_bolts")


def read_config(path: str | Path, trust: tuple[str, ...] = ()) -> dict[str, Any]:
    """The resolved configuration stored in a checkpoint by `python run.py fit`.

    Tensors are mapped to no memory at all; nothing is unpickled but plain containers and numbers.

    Args:
        path: A local checkpoint file.
        trust: Packages, beside this one and Lightning, whose classes the checkpoint may name.

    Raises:
        ValueError: If there is no such file, it is no checkpoint of this project, or it names a class outside the
            trusted packages.
    """
    path = Path(path)
    try:
        config = yaml.safe_load(check(path)[CONFIG_KEY])
    except (KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise _no_checkpoint(path, error) from error
    allowed = (*TRUSTED, *trust)
    for name in _class_paths(config):
        if name.split(".")[0] not in allowed:
            raise ValueError(
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
        ValueError: If there is no such file, or it holds anything but tensors and plain containers.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(
            f"ckpt_path: got {path}, which is not a file; expected a checkpoint a run of `fit` has written"
        )
    try:
        # Lightning's own loader knows no "meta"; mmap keeps the weights of a large model on disk
        return torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise _no_checkpoint(path, error) from error


def _no_checkpoint(path: Path, error: Exception) -> ValueError:
    reason = (str(error).splitlines() or [""])[0][:200]
    return ValueError(
        f"ckpt_path: {path} is not a checkpoint written by `python run.py fit` ({type(error).__name__}: {reason})"
    )


def _class_paths(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [str(node["class_path"])] if "class_path" in node else []
        return own + [name for value in node.values() for name in _class_paths(value)]
    if isinstance(node, list):
        return [name for value in node for name in _class_paths(value)]
    return []
