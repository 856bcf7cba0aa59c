"""Who tokenises the portions of a corpus: processes of this machine, or a cluster by Ray.

Either way one process reads the portions and gets their tokens back in the order in which they were read. So what is
written depends neither on who tokenised it nor on who died trying.

submitit was looked at for the cluster: it starts whole jobs through SLURM and hands back what each returns at its end.
Tokenising needs workers that stay and get a megabyte of text many times a second, which is what Ray's tasks are.
"""

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

import tokenizers

from kerple.data.prepare.corpora import Record
from kerple.data.prepare.encode import Encoded, Encoder, Raw, encode_from_store, encode_in_worker, start_worker
from kerple.errors import UserError
from kerple.runs.cluster import cores, joined

WAITING_BYTES = 1 << 28  # raw bytes on their way, whatever the number of workers
RETRIES = 3  # of a portion whose worker died; tokenising it again gives the same tokens

Portion = tuple[int, list[Record]]  # number of the source, and records of it that are tokenised together
Tokenizer = tuple[str, int, str]  # the arguments of Encoder
Pending = TypeVar("Pending")


def local(portions: Iterator[Portion], tokenizer: Tokenizer, workers: int) -> Iterator[tuple[Portion, Encoded]]:
    """Tokenise by `workers` processes of this machine; 0 is one a core, 1 is this process.

    When a process dies, all are started anew and get what was under way again.

    Raises:
        UserError: Processes died while they had the same portion `RETRIES` + 1 times.
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
        except BrokenProcessPool:  # noticed and mended when the next result is asked for
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


def ray(portions: Iterator[Portion], tokenizer: Tokenizer, workers: int) -> Iterator[tuple[Portion, Encoded]]:
    """Tokenise on a Ray cluster, `workers` portions at a time, each by one CPU of it; 0 is all CPUs it has.

    Ray gives a portion whose worker or machine dies to another one, `RETRIES` times.

    Raises:
        UserError: Ray is not installed, a portion was lost too often, or a machine has another version of `tokenizers`.
    """
    with joined("prepare_engine", "prepare_engine: local") as cluster:
        tasks = cluster.remote(num_cpus=1, max_retries=RETRIES)(encode_from_store)
        stored = cluster.put((*tokenizer, tokenizers.__version__))
        cpus = int(cluster.cluster_resources().get("CPU", 1))
        # without a number asked for, Ray itself runs no more than there are CPUs, and a second portion waits for each
        most = workers or 2 * cpus
        running = []

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


ENGINES = {"local": local, "ray": ray}


def in_order(
    portions: Iterator[Portion], send: Callable[[list[Raw]], Pending], receive: Callable[[Pending], Encoded], most: int
) -> Iterator[tuple[Portion, Encoded]]:
    """Yield results in the order of the portions, with at most `most` portions and WAITING_BYTES on their way.

    A single portion of more bytes than that travels alone.
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
