"""Tokenisation of documents by several processes."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
from tokenizers import Tokenizer

from kerple.base.errors import UserError, require
from kerple.base.processor_cores import cores
from kerple.base.ray_cluster import Cluster
from kerple.data.manifest import SPLITS
from kerple.data.prepare.readers import Document
from kerple.data.shards import Tokens
from kerple.data.tokenizer import encode


class Encoder(NamedTuple):
    """The settings of `tokenise`, which are sent to the workers.

    Attributes:
        tokenizer: The content of a `tokenizer.json`.
        end_of_text: Id of the token after each document.
        dtype: Dtype of the tokens, see `token_dtype`.
    """

    tokenizer: str
    end_of_text: int
    dtype: np.dtype[Any]


class Encoded(NamedTuple):
    """The tokens (n,) of some documents of a split, the number of these documents, and the number of UTF-8 bytes."""

    tokens: Tokens
    documents: int
    bytes: int


def tokenise(encoder: Encoder, documents: list[Document]) -> dict[str, Encoded]:
    """Return the tokens of documents for each split, in the order of the documents.

    Args:
        encoder: The settings.
        documents: Documents with a split.

    Raises:
        UserError: The tokens of a text contain the end-of-text token.
    """
    tokenizer = _load(encoder.tokenizer)
    tokens: dict[str, list[Tokens]] = {split: [] for split in SPLITS}
    sizes = dict.fromkeys(SPLITS, 0)
    for document in documents:
        ids = document.ids or encode(tokenizer, document.text)
        given = f"a tokenizer whose end-of-text token is in the tokens of {document.name}"
        require(encoder.end_of_text not in ids, "data.tokenizer", given, "another one; or remove the document")
        tokens[document.split].append(np.array([*ids, encoder.end_of_text], encoder.dtype))
        sizes[document.split] += len(document.text.encode())
    nothing = np.empty(0, encoder.dtype)
    return {s: Encoded(np.concatenate([nothing, *tokens[s]]), len(tokens[s]), sizes[s]) for s in SPLITS}


_load = lru_cache(maxsize=1)(Tokenizer.from_str)

Key = TypeVar("Key")


def tokenise_parts(
    workers: int, encoder: Encoder, parts: Iterable[tuple[Key, list[Document]]]
) -> Generator[tuple[Key, dict[str, Encoded]], None, None]:
    """Tokenise parts in parallel, and yield the result of `tokenise` for each part, in the order of the parts.

    The processes end when the generator is closed. At most ``workers`` + 1 parts are held in memory.

    Args:
        workers: Number of processes. 0 starts one per core. With 1, documents are tokenised in this process.
        encoder: The settings.
        parts: A key and the documents of each part; the key is returned with the result.

    Raises:
        UserError: A process has ended unexpectedly, or `tokenise` raises a UserError.
    """
    workers = workers or cores()
    if workers == 1:
        yield from ((key, tokenise(encoder, documents)) for key, documents in parts)
        return
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker)
    waiting = deque[tuple[Key, Future[dict[str, Encoded]]]]()
    try:
        for key, documents in parts:
            waiting.append((key, pool.submit(tokenise, encoder, documents)))
            if len(waiting) > workers:
                key, future = waiting.popleft()
                yield key, future.result()
        yield from ((key, future.result()) for key, future in waiting)
    except BrokenProcessPool as error:
        reason = "one of which ended unexpectedly, probably because memory ran out"
        advice = "run the command again with fewer; finished parts are kept"
        raise UserError(f"data.prepare_workers: got {workers}, {reason}; {advice}") from error
    except BaseException:
        # the pool does not know a process that it was starting when a signal came, and would wait for it without end
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def tokenise_on_ray(
    cluster: Cluster, workers: int, encoder: Encoder, parts: Iterable[tuple[Key, list[Document]]]
) -> Generator[tuple[Key, dict[str, Encoded]], None, None]:
    """Tokenise parts on the nodes of a Ray cluster, and yield the same as `tokenise_parts`.

    Args:
        cluster: The cluster.
        workers: Number of cores to use. With 0, those of the cluster.
        encoder: The settings.
        parts: A key and the documents of each part.

    Raises:
        UserError: The cluster does not answer, or `tokenise` raises a UserError.
    """
    workers = workers or int(cluster.ray.cluster_resources().get("CPU", 1))
    submit, waiting = cluster.task(tokenise, 1), deque[tuple[Key, Any]]()
    try:
        for key, documents in parts:
            waiting.append((key, submit(encoder, documents)))
            if len(waiting) > workers:
                key, reference = waiting.popleft()
                yield key, cluster.result(reference)
        while waiting:
            key, reference = waiting.popleft()
            yield key, cluster.result(reference)
    finally:
        for _, reference in waiting:
            cluster.ray.cancel(reference)


def _start_worker() -> None:
    """Ignore SIGINT, which the parent process handles, and end this process when its parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Wait until the parent process has ended or was killed, and end this process."""
    parent: Any = multiprocessing.parent_process()
    parent.join()
    os._exit(1)
