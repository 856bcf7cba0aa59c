"""Batches of text for training and evaluation, and the loader of training batches, which can resume."""

import atexit
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from pytorch_lightning import LightningDataModule, Trainer
from pytorch_lightning.callbacks import GradientAccumulationScheduler
from torch.utils.data import DataLoader

from kerple.base.errors import UserError, require
from kerple.data.documents import Documents
from kerple.data.evaluation_text import TextBlocks
from kerple.data.order import Indices
from kerple.data.shards import ShardFetcher, TokenStream
from kerple.model import Batch

LOCATED = 4096  # number of samples that are located at once
READ = 2**17  # largest number of tokens that are read at once, except in larger batches


def rank_and_world_size(module: LightningDataModule) -> tuple[int, int]:
    """Return the rank and the number of processes of a data module's trainer; (0, 1) without a trainer."""
    return (module.trainer.global_rank, module.trainer.world_size) if module.trainer is not None else (0, 1)


def batches_of_run(trainer: Trainer) -> int:
    """Return the number of batches that a device reads in ``trainer.max_steps`` steps, all of them in one epoch.

    A GradientAccumulationScheduler sets its factor only when the first epoch starts, after the loader is made.
    """
    found = getattr(trainer, "callbacks", ())  # Lightning's type lacks this attribute
    factors = [c.get_accumulate_grad_batches(0) for c in found if isinstance(c, GradientAccumulationScheduler)]
    return trainer.max_steps * (factors or [trainer.accumulate_grad_batches])[0]


def batches_of_epoch(limit: float | None, batches: int) -> int:
    """Return the number of batches after which Lightning ends an epoch of a loader with this number of batches.

    Args:
        limit: The option ``limit_train_batches``: a number of batches, or a float for a fraction; None for all batches.
        batches: Number of batches of the loader.
    """
    return min(batches, limit) if isinstance(limit, int) else int(batches * (1.0 if limit is None else limit))


def read_samples(stream: TokenStream, length: int, documents: Documents | None, starts: Sequence[int]) -> Batch:
    """Return a batch of training samples, {"tokens": (B, T + 1) int64} and the entries of ``documents``.

    Args:
        stream: Tokens of the training split.
        length: Training length, T.
        documents: Documents of the training split; None if they are not used.
        starts: Index of the first token of each of the B samples.
    """
    tokens = np.empty((len(starts), length + 1), np.int64)
    for row, start in enumerate(starts):
        tokens[row] = stream[start : start + length + 1]
    batch = {"tokens": torch.from_numpy(tokens)}
    return batch if documents is None else batch | documents.entries(np.array(starts), length + 1)


@dataclass(eq=False)
class BlockBatches:
    """Batches of blocks for evaluation, in order. Lightning uses it in place of a `DataLoader`.

    An item is {"tokens": (B, T + 1) int64, "index": (B,) int64, "scored": (B, T) bool}, where T is the number of
    targets in a block. "index" has the index of each row's block. Rows without a block have index -1 and are not
    scored. The entries of ``documents`` are added.

    Batch i belongs to rank i modulo the number of ranks. Every rank gets the same number of batches. No block is
    repeated, so that sums over ranks equal the sums of a single process.

    Args:
        blocks: The blocks.
        batch_size: Number of rows of a batch, B.
        rank: Index of this process.
        world_size: Number of processes.
        documents: Documents of the text; None if they are not used.
    """

    blocks: TextBlocks
    batch_size: int
    rank: int
    world_size: int
    documents: Documents | None = None

    def __len__(self) -> int:
        return -(-len(self.blocks) // (self.batch_size * self.world_size))

    def __getitem__(self, index: int) -> Batch:
        first = (index * self.world_size + self.rank) * self.batch_size
        tokens = torch.zeros(self.batch_size, self.blocks.length + 1, dtype=torch.int64)  # (B, T + 1)
        indices = torch.full((self.batch_size,), -1)
        for row, block in enumerate(range(first, min(first + self.batch_size, len(self.blocks)))):
            tokens[row], indices[row] = self.blocks[block], block
        batch = {"tokens": tokens, "index": indices}
        scored = (indices >= 0)[:, None].expand(-1, self.blocks.length)  # (B, T)
        if self.documents is not None:
            segments = self.blocks.starts[indices.clamp(min=0)].numpy()
            batch |= self.documents.entries(segments, self.blocks.length + 1)
        return batch | {"scored": batch.get("scored", scored) & scored}

    def __iter__(self) -> Iterator[Batch]:
        return map(self.__getitem__, range(len(self)))


@dataclass(eq=False)
class TrainingLoader:
    """Iterates over this rank's training batches, with a state from which it can resume.

    A micro-batch consists of the samples that all W ranks process in one forward and backward pass. Micro-batch i has
    the samples i·W·B .. (i + 1)·W·B - 1. Rank r processes the r-th group of B of these samples. For a given number of
    samples per optimiser step, the samples of each step therefore depend neither on W nor on the number of accumulation
    steps.

    The state holds two numbers of samples that all ranks together have received: before this epoch, and in this epoch.
    Batches that workers have only loaded ahead do not count. A run can resume with another number of ranks, workers or
    accumulation steps if the new W·B divides both numbers. An epoch has only whole micro-batches, so that another W·B
    may change its number of samples, which is an error if the epochs repeat the same samples. torchdata's
    `StatefulDataLoader` does not allow another number of ranks. This class is not a `DataLoader`, because Lightning
    would replace the order of the samples.

    Args:
        read: Returns a batch of samples from their indices, or from their places if `locate` is given. The indices of
            an epoch follow those of the previous epoch. A call reads one micro-batch or several.
        batch_size: Number of samples per rank and micro-batch, B.
        batches: Number of micro-batches in an epoch.
        rank: Index of this process, r.
        world_size: Number of processes, W.
        workers: Number of processes that load batches ahead; 0 to load in this process.
        pin_memory: Whether to copy batches to page-locked memory, for faster transfer to a GPU.
        locate: Returns the places (n,) int64, at least 0, of samples from their indices (n,) int64. It is called for
            many batches at once, because a call for one sample takes nearly as long as one for hundreds.
        lane: Returns the lanes (n,) int64 of samples from their indices (n,) int64. The samples of a micro-batch are
            sorted by lane before rank r gets the r-th group of them.
        fetcher: Fetches the shards of places, `ahead` micro-batches before they are read.
        ahead: Number of micro-batches; 0 for those that are located at once.
        batches_per_read: Largest number of micro-batches in a call of `read`, which has a cost that does not depend on
            the number of samples. The first call of an epoch reads one, and each further call up to twice as many as
            the one before, so that the first step waits only for its own shards.
        epoch: Number of micro-batches after which the Trainer ends an epoch; None for ``batches``.
        repeats: Whether all epochs have the same samples.
    """

    read: Callable[[Sequence[int]], Batch]
    batch_size: int
    batches: int
    rank: int
    world_size: int
    workers: int = 0
    pin_memory: bool = False
    locate: Callable[[Indices], Indices] | None = None
    lane: Callable[[Indices], Indices] | None = None
    fetcher: Callable[[], ShardFetcher] | None = None
    ahead: int = 0
    batches_per_read: int = 1
    epoch: int | None = None
    repeats: bool = False

    def __post_init__(self) -> None:
        self.samples = self.batch_size * self.world_size  # number of samples in a micro-batch
        self.start = self.done = 0  # numbers of micro-batches received before this epoch, and in it
        self.resumed = False  # whether the next epoch continues an interrupted one

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Batch]:
        if not self.resumed or self.done >= (self.epoch or len(self)):
            self.start, self.done = self.start + self.done, 0
        self.resumed = False
        # item i of the data set is i, the index or place of a sample; `read` maps many of them to a batch
        loader: DataLoader[Batch] = DataLoader(
            range(sys.maxsize),  # type: ignore[arg-type]
            batch_sampler=self._places(range(self.start + self.done, self.start + len(self))),
            collate_fn=self.read,
            num_workers=self.workers,
            pin_memory=self.pin_memory,
            generator=torch.Generator(),  # a DataLoader draws a seed, which must not change the model's random numbers
            worker_init_fn=_start_worker,
        )
        batches = iter(loader)
        stop = getattr(batches, "_shutdown_workers", lambda: None)  # missing without workers
        # at the exit, multiprocessing sends SIGTERM to the workers, which ignore it, and waits for them
        atexit.register(stop)
        try:
            for batch in batches:
                for micro_batch in zip(*(values.split(self.batch_size) for values in batch.values()), strict=True):
                    self.done += 1
                    yield dict(zip(batch, micro_batch, strict=True))
        except UserError as error:
            # the message of an error in a worker begins with a traceback, and ends with the message of the error
            kind, last = type(error), str(error).strip().rpartition("\n")[2]
            raise kind(last.removeprefix(f"{kind.__module__}.{kind.__qualname__}: ")) from error
        finally:
            stop()
            atexit.unregister(stop)

    def _places(self, batches: range) -> Iterator[list[int]]:
        """Yield what `read` gets in each call: this rank's parts of up to `batches_per_read` of these micro-batches."""
        count = 1
        for places in self._located(batches) if self.fetcher is None else self._fetched(self.fetcher(), batches):
            while len(places):
                yield places[:count].ravel().tolist()
                places, count = places[count:], min(2 * count, self.batches_per_read)

    def _fetched(self, fetcher: ShardFetcher, batches: range) -> Iterator[Indices]:
        """Yield the places of `_located` after `fetcher` has got those of `ahead` further micro-batches."""
        waiting = deque[Indices]()
        try:
            for places in self._located(batches):
                fetcher.request(places)
                waiting.append(places)
                if sum(map(len, waiting)) > self.ahead:
                    yield waiting.popleft()
            yield from waiting
        finally:
            fetcher.stop()

    def _located(self, batches: range) -> Iterator[Indices]:
        """Yield the places of this rank's part of many of these micro-batches, (batches, B) int64."""
        own = self.rank * self.batch_size + np.arange(self.batch_size)
        at_once = -(-LOCATED // self.batch_size)
        at_once = min(at_once, self.ahead) or at_once
        for first in range(0, len(batches), at_once):
            samples = np.array(batches[first : first + at_once])[:, None] * self.samples
            if self.lane is None:
                samples = samples + own
            else:
                samples = samples + np.arange(self.samples)
                order = np.argsort(self.lane(samples.ravel()).reshape(samples.shape), axis=1, kind="stable")
                samples = np.take_along_axis(samples, order, axis=1)[:, own]
            yield samples if self.locate is None else self.locate(samples.ravel()).reshape(samples.shape)

    def state_dict(self) -> dict[str, int]:
        """Return the numbers of samples that all ranks together received before this epoch and in it.

        With `repeats`, the state also has the number of samples of an epoch.
        """
        state = {"samples_before_epoch": self.start * self.samples, "samples_in_epoch": self.done * self.samples}
        return state | {"samples_of_epoch": len(self) * self.samples} if self.repeats else state

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the numbers of samples in ``state``, which `state_dict` of an earlier run has returned.

        Raises:
            UserError: One of the numbers is not a multiple of the number of samples in a micro-batch of all ranks, or
                epochs that have the same samples had another number of them.
        """
        before, inside = (state[f"samples_{when}_epoch"] for when in ("before", "in"))
        valid = before % self.samples == inside % self.samples == 0
        expected = f"a divisor of {before} and {inside}, the samples read in earlier epochs and in this epoch"
        advice = "use the batch_size and devices of the earlier run"
        given = f"batches of {self.samples} samples over all devices"
        require(valid, "data.batch_size", given, f"{expected}; {advice}")
        size = len(self) * self.samples
        earlier = state.get("samples_of_epoch", size) if self.repeats else size  # missing in earlier versions
        given, expected = f"an epoch of {size} samples", f"{earlier} as in the earlier run; {advice}"
        require(size == earlier, "data.batch_size", given, expected)
        self.start, self.done, self.resumed = before // self.samples, inside // self.samples, True


def _start_worker(worker: int) -> None:
    """Use one thread, and ignore signals that a group of processes gets, and that the training process handles."""
    torch.set_num_threads(1)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
