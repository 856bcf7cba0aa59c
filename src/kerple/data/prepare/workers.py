"""Tokenisation of documents by several processes."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from kerple.base.errors import UserError
from kerple.base.resources import cores
from kerple.data.manifest import SPLITS
from kerple.data.prepare.readers import Document
from kerple.data.shards import Tokens
from kerple.data.tokenizer import encode


class Encoder(NamedTuple):
    """The settings of `tokenise`.

    Attributes:
        tokenizer: The content of a `tokenizer.json`.
        end_of_text: Id of the token after each document.
        dtype: Dtype of the tokens, see `Manifest.dtype`.
    """

    tokenizer: str
    end_of_text: int
    dtype: np.dtype[Any]


class Encoded(NamedTuple):
    """The tokens (n,) of documents of a split, the number of documents, and their UTF-8 bytes."""

    tokens: Tokens
    documents: int
    bytes: int


def tokenise(encoder: Encoder, documents: list[Document]) -> dict[str, Encoded]:
    """The tokens of documents by split, in the order of the documents, whose splits are set.

    Raises:
        UserError: The tokenizer encodes a text with the end-of-text token.
    """
    tokenizer = _load(encoder.tokenizer)
    tokens: dict[str, list[Tokens]] = {split: [] for split in SPLITS}
    sizes = dict.fromkeys(SPLITS, 0)
    for document in documents:
        ids = encode(tokenizer, document.text)
        if encoder.end_of_text in ids:
            raise UserError(
                "data.tokenizer: got one that produces its end-of-text token inside a document; choose another"
            )
        tokens[document.split].append(np.array([*ids, encoder.end_of_text], encoder.dtype))
        sizes[document.split] += len(document.text.encode())
    nothing = np.empty(0, encoder.dtype)
    return {s: Encoded(np.concatenate([nothing, *tokens[s]]), len(tokens[s]), sizes[s]) for s in SPLITS}


_load = lru_cache(maxsize=1)(Tokenizer.from_str)

Submit = Callable[[Encoder, list[Document]], Callable[[], dict[str, Encoded]]]


@contextmanager
def tokenising(workers: int) -> Iterator[tuple[Submit, int]]:
    """Start processes that tokenise.

    Args:
        workers: Number of processes. 0 starts one per core, and 1 uses this process.

    Yields:
        A function that submits documents and returns a function, which waits for the result and returns it; and the
        number of started processes.

    Raises:
        UserError: A process has died.
    """
    workers = workers or cores()
    if workers == 1:
        yield lambda *arguments: partial(tokenise, *arguments), 0
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker)
    try:
        yield lambda *arguments: pool.submit(tokenise, *arguments).result, workers
    except BrokenProcessPool as error:
        reason = "of which one died, probably because memory ran out; start again with fewer, finished parts are kept"
        raise UserError(f"data.prepare_workers: got {workers}, {reason}") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Ignore SIGINT, which the parent process handles, and end when the parent ends or is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent: Any = multiprocessing.parent_process()
    parent.join()
    os._exit(1)
