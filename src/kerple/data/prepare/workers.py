"""Workers that tokenise the portions of a corpus: processes of this machine, or a cluster by Ray.

With both, one process reads the portions and gets their tokens back in the order in which they were read. So the shards
do not depend on which worker tokenised a portion, nor on workers that died.

submitit would be no replacement: it starts whole jobs through SLURM and returns what each has at its end. Tokenising
needs workers that stay and get a megabyte of text many times a second, as Ray's tasks do.
"""

import multiprocessing
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import tokenizers

from kerple.base.cluster import cores, joined
from kerple.base.errors import UserError
from kerple.data.prepare.encode import Encoded, Encoder, Raw, encode_from_store, encode_in_worker, start_worker
from kerple.data.prepare.sources import Record

WAITING_BYTES = 1 << 28  # largest number of raw bytes under way, for any number of workers
RETRIES = 3  # new attempts at a portion whose worker died; they give the same tokens

Portion = tuple[int, list[Record]]  # number of the source, and records of it that are tokenised together
Tokenizer = tuple[str, int, str]  # the arguments of Encoder
Results = Generator[tuple[Portion, Encoded], None, None]
Pending = TypeVar("Pending")


def local(portions: Iterator[Portion], tokenizer: Tokenizer, workers: int) -> Results:
    """Tokenise by `workers` processes of this machine; 0 means one per core, 1 means this process.

    When a process dies, all are started anew and get the portions that were under way again.

    Raises:
        UserError: Processes died `RETRIES` + 1 times while they had the same portion.
    """
    workers = workers or cores()
    if workers == 1:
        own = Encoder(*tokenizer)
        for portion in portions:
            yield portion, own(_bare(portion))
        return

    def start() -> ProcessPoolExecutor:
        return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), start_worker, tokenizer)

    pool = start()
    under_way: deque[tuple[list[Raw], Future[Encoded] | None]] = deque()

    def submit(raw: list[Raw]) -> Future[Encoded] | None:
        try:
            return pool.submit(encode_in_worker, raw)
        except BrokenProcessPool:  # `receive` notices it and starts a new pool
            return None

    def send(raw: list[Raw]) -> None:
        under_way.append((raw, submit(raw)))

    def receive(_: None) -> Encoded:
        nonlocal pool
        for _attempt in range(RETRIES + 1):
            future = under_way[0][1]
            try:
                if future is None:
                    raise BrokenProcessPool
                result = future.result()
            except BrokenProcessPool:
                pool.shutdown(wait=True, cancel_futures=True)
                pool = start()
                for number, (raw, _old) in enumerate(under_way):
                    under_way[number] = raw, submit(raw)
            else:
                under_way.popleft()
                return result
        raise _lost("a process died each time")

    try:
        yield from in_order(portions, send, receive, 2 * workers)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def ray(portions: Iterator[Portion], tokenizer: Tokenizer, workers: int) -> Results:
    """Tokenise on a Ray cluster, `workers` portions at a time, each by one CPU; 0 means all CPUs of the cluster.

    When a worker or its machine dies, Ray gives the portion to another worker, up to `RETRIES` times.

    Raises:
        UserError: Ray is not installed, a portion was lost too often, or a machine has another version of `tokenizers`.
    """
    with joined("prepare_engine", "prepare_engine: local") as cluster:
        tasks = cluster.remote(num_cpus=1, max_retries=RETRIES)(encode_from_store)
        stored = cluster.put((*tokenizer, tokenizers.__version__))
        cpus = int(cluster.cluster_resources().get("CPU", 1))
        # with 0 workers, Ray runs as many tasks as there are CPUs, and one more portion waits for each of them
        most = workers or 2 * cpus
        running: list[Any] = []

        def send(raw: list[Raw]) -> object:
            nonlocal running
            while len(running) >= most:
                _, running = cluster.wait(running)
            running.append(tasks.remote([stored], raw))
            return running[-1]

        try:
            yield from in_order(portions, send, cluster.get, 2 * (workers or cpus))
        except cluster.exceptions.RayTaskError as error:
            raise error.cause from error
        except cluster.exceptions.RayError as error:
            raise _lost(str(error)) from error


WORKERS = {"local": local, "ray": ray}


def in_order(
    portions: Iterator[Portion], send: Callable[[list[Raw]], Pending], receive: Callable[[Pending], Encoded], most: int
) -> Iterator[tuple[Portion, Encoded]]:
    """Yield the portions and their tokens in order, with at most `most` portions and `WAITING_BYTES` under way.

    A single portion of more than `WAITING_BYTES` is under way alone.

    Args:
        portions: The portions.
        send: Starts tokenising a portion's records and returns a handle.
        receive: Waits for the result of a handle.
        most: Largest number of portions under way.
    """
    waiting: deque[tuple[Portion, int, Pending]] = deque()
    waiting_bytes = 0
    for portion in portions:
        size = sum(len(record.raw) for record in portion[1])
        waiting.append((portion, size, send(_bare(portion))))
        waiting_bytes += size
        while len(waiting) > most or (waiting_bytes > WAITING_BYTES and len(waiting) > 1):
            first, size, result = waiting.popleft()
            waiting_bytes -= size
            yield first, receive(result)
    while waiting:
        first, _, result = waiting.popleft()
        yield first, receive(result)


def _bare(portion: Portion) -> list[Raw]:
    return [(record.raw, record.json, record.fault) for record in portion[1]]


def _lost(reason: str) -> UserError:
    return UserError(
        f"data.prepare_workers: tokenising the same documents failed {RETRIES + 1} times ({reason}), most likely for "
        "want of memory; start again with fewer workers, what is done is kept"
    )
