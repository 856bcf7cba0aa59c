"""A checksum of the content of a checkpoint, by which damage and changes are noticed when it is read."""

import hashlib
from typing import Any

import torch
from torch import Tensor

SEAL = "sha256"


def seal(checkpoint: dict[str, Any]) -> str:
    """sha256 of all keys and values of a checkpoint except the seal itself.

    It is the same before a checkpoint is written and after it is read, and for tensors on any device. It covers
    containers, numbers, texts, and tensors with their dtypes and shapes; of other objects, only the names of their
    classes.
    """
    digest = hashlib.sha256()
    _feed(digest, {key: value for key, value in checkpoint.items() if key != SEAL})
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, dict):
        digest.update(b"{%d" % len(value))
        for key, inner in value.items():
            _feed(digest, key)
            _feed(digest, inner)
    elif isinstance(value, list | tuple):
        digest.update(b"[%d" % len(value))
        for inner in value:
            _feed(digest, inner)
    elif isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(flat.view(torch.uint8).numpy() if flat.numel() else b"")
    elif isinstance(value, bytes | bytearray):
        digest.update(b"b%d:" % len(value) + value)
    elif isinstance(value, str):
        digest.update(b"s%d:" % len(value) + value.encode(errors="surrogatepass"))
    elif isinstance(value, bool | int | None):
        digest.update(f"i{value};".encode())
    elif isinstance(value, float):
        digest.update(f"f{float(value).hex()};".encode())
    else:
        digest.update(type(value).__qualname__.encode() + b";")
