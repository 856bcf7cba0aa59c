"""Who tokenises batches of records: processes of this machine, or a cluster by Ray.

Either way batches are read by one process and come back to it in the order in which they were read, so that what is
written does not depend on who tokenised it, or on whom it was tried.
"""

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

import tokenizers

from kerple.data.prepare.corpora import Record
from kerple.data.prepare.encode import Encoded, Encoder, Raw, encode_from_store, encode_in_worker, start_worker
from kerple.errors import UserError
from kerple.runs.cluster import cores, joined

WAITING_BYTES = 1 << 28  # raw bytes on their way, whatever the number of workers
RETRIES = 3  # of a batch whose worker died; tokenising it again gives the same tokens

Batch = tuple[int, list[Record]]  # number of the source, records
Tokenizer = tuple[str, int, str]  # the arguments of Encoder
Pending = TypeVar("Pending")


def local(batches: Iterator[Batch], tokenizer: Tokenizer, workers: int) -> Iterator[tuple[Batch, Encoded]]:
    """Tokenise by `workers` processes of this machine, 0: one a core, 1: this one.

    Raises:
        UserError: A process died.
    """
    workers = workers or cores()
    if workers == 1:
        own = Encoder(*tokenizer)
        for batch in batches:
            yield batch, own(_bare(batch))
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), start_worker, tokenizer)
    try:
        yield from in_order(
            batches, lambda raw: pool.submit(encode_in_worker, raw), lambda future: future.result(), 2 * workers
        )
    except BrokenProcessPool as error:
        raise UserError(
            "prepare_workers: a tokenising process died, most likely for want of memory; start again with fewer, "
            "what is done is kept"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def ray(batches: Iterator[Batch], tokenizer: Tokenizer, workers: int) -> Iterator[tuple[Batch, Encoded]]:
    """Tokenise on a Ray cluster, `workers` batches at a time, each by one CPU of it; 0: all CPUs it has.

    A batch whose worker or machine dies is given to another one, three times.

    Raises:
        UserError: Ray is not installed, a batch was lost too often, or a machine has another version of `tokenizers`.
    """
    with joined("prepare_engine", "prepare_engine: local") as cluster:
        tasks = cluster.remote(num_cpus=1, max_retries=RETRIES)(encode_from_store)
        stored = cluster.put((*tokenizer, tokenizers.__version__))
        cpus = int(cluster.cluster_resources().get("CPU", 1))
        # without a number asked for, Ray itself runs no more than there are CPUs, and a second batch waits for each
        most = workers or 2 * cpus
        running = []

        def send(raw: list[Raw]) -> object:
            nonlocal running
            while len(running) >= most:
                _, running = cluster.wait(running)
            running.append(tasks.remote([stored], raw))
            return running[-1]

        try:
            yield from in_order(batches, send, cluster.get, 2 * (workers or cpus))
        except cluster.exceptions.RayTaskError as error:
            raise error.cause from error
        except cluster.exceptions.RayError as error:
            raise UserError(
                f"prepare_engine: a batch was lost {RETRIES + 1} times with the worker that tokenised it, most likely "
                f"for want of memory ({error}); start again with fewer prepare_workers, what is done is kept"
            ) from error


ENGINES = {"local": local, "ray": ray}


def in_order(
    batches: Iterator[Batch], send: Callable[[list[Raw]], Pending], receive: Callable[[Pending], Encoded], most: int
) -> Iterator[tuple[Batch, Encoded]]:
    """Results in the order of the batches, with at most `most` batches and WAITING_BYTES on their way.

    A single batch of more bytes than that travels alone.
    """
    waiting: deque[tuple[Batch, int, Pending]] = deque()
    waiting_bytes = 0
    for batch in batches:
        size = sum(len(record.raw) for record in batch[1])
        waiting.append((batch, size, send(_bare(batch))))
        waiting_bytes += size
        while len(waiting) > most or (waiting_bytes > WAITING_BYTES and len(waiting) > 1):
            first, size, result = waiting.popleft()
            waiting_bytes -= size
            yield first, receive(result)
    while waiting:
        first, _, result = waiting.popleft()
        yield first, receive(result)


def _bare(batch: Batch) -> list[Raw]:
    return [(record.raw, record.json, record.fault) for record in batch[1]]
