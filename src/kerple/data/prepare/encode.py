"""Parsing and tokenising of records: what each worker does. Without torch, so that a worker starts at once."""

import hashlib
import json
import multiprocessing
import os
import platform
import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import Tokenizer

from kerple.base.errors import UserError
from kerple.data.tokenizer import encode, one_thread

Raw = tuple[bytes, bool, str | None]  # a record's bytes, whether they are JSON, its fault


@dataclass(frozen=True)
class Encoded:
    """A batch of tokenised records.

    Args:
        digests: Digest of each document's UTF-8 bytes, empty for a record with a fault.
        faults: Why a record is not a document, or None.
        sizes: Number of UTF-8 bytes of each document.
        lengths: Tokens of each record (records,), its end-of-text token included; 0 for a fault.
        tokens: The tokens of all records, concatenated (tokens,).
    """

    digests: list[bytes]
    faults: list[str | None]
    sizes: list[int]
    lengths: NDArray[np.int64]
    tokens: NDArray[np.uint32]


class Encoder:
    """Parses and tokenises batches of raw records.

    Args:
        tokenizer: The tokenizer as JSON, the content of a `tokenizer.json`.
        end_of_text: Id that is appended to every document.
        text_field: Key of the text in a JSON line.
    """

    def __init__(self, tokenizer: str, end_of_text: int, text_field: str) -> None:
        self.tokenizer, self.end_of_text, self.text_field = Tokenizer.from_str(tokenizer), end_of_text, text_field

    def __call__(self, records: list[Raw]) -> Encoded:
        texts, digests, faults, sizes = [], [], [], []
        for raw, is_json, fault in records:
            text, raw, fault = ("", b"", fault) if fault else parse(raw, is_json, self.text_field)
            faults.append(fault)
            sizes.append(len(raw))
            digests.append(b"" if fault else digest_of(raw))
            if not fault:
                texts.append(text)
        ids = [np.array([*own, self.end_of_text], np.uint32) for own in encode(self.tokenizer, texts)]
        lengths = np.zeros(len(records), np.int64)
        lengths[[fault is None for fault in faults]] = [len(own) for own in ids]
        return Encoded(digests, faults, sizes, lengths, np.concatenate([np.empty(0, np.uint32), *ids]))


def digest_of(raw: bytes) -> bytes:
    """Digest by which a document is known: 128 bits of blake2b of its UTF-8 bytes."""
    return hashlib.blake2b(raw, digest_size=16).digest()


def parse(raw: bytes, is_json: bool, text_field: str) -> tuple[str, bytes, str | None]:
    """Return the text of a raw record, the text's UTF-8 bytes, and the record's fault or None.

    A fault is its kind, which may be followed by a colon and the details of this record.
    """
    if not raw.strip():
        return "", b"", "empty"
    try:
        if is_json:
            entry = json.loads(raw)
            text = entry.get(text_field) if isinstance(entry, dict) else None
            if not isinstance(text, str):
                keys = f"the keys are {', '.join(entry)}" if isinstance(entry, dict) else "not an object"
                return "", b"", f"no text: {text_field!r} is no string, {keys[:200]}"
            raw = text.encode()
        else:
            text = raw.decode()
    except RecursionError:
        return "", b"", "JSON too deep"
    except UnicodeError:
        return "", b"", "not Unicode"
    except ValueError:
        return "", b"", "broken JSON"
    return (text, raw, None) if raw else ("", b"", "empty")


_encoder: Encoder | None = None


def start_worker(tokenizer: str, end_of_text: int, text_field: str) -> None:
    """Load the encoder of this worker process, which ends when the process that started it has ended or was killed."""
    global _encoder
    one_thread()
    _encoder = Encoder(tokenizer, end_of_text, text_field)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent: Any = multiprocessing.parent_process()
    parent.join()
    os._exit(1)


def encode_in_worker(records: list[Raw]) -> Encoded:
    """Encode a batch by the encoder that `start_worker` has loaded into this process."""
    assert _encoder is not None
    return _encoder(records)


def encode_from_store(tokenizer: list[Any], records: list[Raw]) -> Encoded:
    """Encode a batch in a worker of Ray.

    Args:
        tokenizer: A list of one reference, to the arguments of `Encoder` and the version of `tokenizers` in the object
            store. It is in a list because Ray fetches what a bare reference names for every batch.
        records: The batch.

    Raises:
        UserError: This machine has another version of `tokenizers`, whose tokens might differ.
    """
    return _encoder_of(tokenizer[0])(records)


@lru_cache(maxsize=1)
def _encoder_of(reference: Any) -> Encoder:
    import ray

    *arguments, version = ray.get(reference)
    if tokenizers.__version__ != version:
        raise UserError(
            f"prepare_engine: machine {platform.node()} of the cluster has tokenizers {tokenizers.__version__}, this "
            f"one {version}; install the same version on all"
        )
    one_thread()
    return Encoder(*arguments)
