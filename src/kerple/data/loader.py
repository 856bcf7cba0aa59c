"""Datasets whose items are batches of text, and their loaders. The loader of training batches can resume."""

import signal
from collections.abc import Iterator, Sized
from dataclasses import dataclass

import numpy as np
import torch
from pytorch_lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from kerple.base.errors import UserError
from kerple.data.order import Order
from kerple.data.shards import TokenStream
from kerple.data.text import TextBlocks
from kerple.model import Batch


def rank_in(module: LightningDataModule) -> tuple[int, int]:
    """Rank of this process and number of processes of the trainer of a data module; 0 and 1 without a trainer."""
    return (module.trainer.global_rank, module.trainer.world_size) if module.trainer is not None else (0, 1)


@dataclass(eq=False)
class TrainingBatches(Dataset[Batch]):
    """Dataset of training batches. Item i is this rank's part of micro-batch i modulo ``batches``,
    {"tokens": (B, T + 1) int64}.

    Micro-batch i consists of the samples i·W·B .. (i + 1)·W·B - 1. Rank r of W gets the r-th group of B samples. The
    samples of an optimiser step depend only on their number, not on how they are divided into ranks and accumulation
    steps.

    Args:
        stream: The token stream.
        order: Maps the index of a sample to its first token.
        batch_size: Samples per rank and micro-batch, B.
        batches: Number of different micro-batches.
        rank: Index of this process.
        ranks: Number of processes, W.
    """

    stream: TokenStream
    order: Order
    batch_size: int
    batches: int
    rank: int
    ranks: int

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> Batch:
        first = (index % self.batches * self.ranks + self.rank) * self.batch_size
        tokens = np.empty((self.batch_size, self.order.length + 1), np.int64)  # (B, T + 1)
        for row, start in enumerate(self.order.starts(first + np.arange(self.batch_size)).tolist()):
            tokens[row] = self.stream.read(start, self.order.length + 1)
        return {"tokens": torch.from_numpy(tokens)}


class BlockBatches(Dataset[Batch]):
    """Dataset of batches of blocks. Item i is {"tokens": (B, T + 1) int64, "index": (B,), "scored": (B, T) bool}.

    The ranks take batches in turn, and every rank gets the same number of batches. No block is repeated, so that sums
    over ranks equal those of one process. Rows without a block have index -1 and are not scored.

    Args:
        blocks: The blocks.
        batch_size: Rows of a batch, B.
        rank: Index of this process.
        ranks: Number of processes.
    """

    def __init__(self, blocks: TextBlocks, batch_size: int, rank: int, ranks: int) -> None:
        self.blocks, self.batch_size, self.rank, self.ranks = blocks, batch_size, rank, ranks

    def __len__(self) -> int:
        return -(-len(self.blocks) // (self.batch_size * self.ranks))

    def __getitem__(self, index: int) -> Batch:
        first = (index * self.ranks + self.rank) * self.batch_size
        tokens = torch.zeros(self.batch_size, self.blocks.length + 1, dtype=torch.int64)  # (B, T + 1)
        numbers = torch.full((self.batch_size,), -1)
        for row, block in enumerate(range(first, min(first + self.batch_size, len(self.blocks)))):
            tokens[row], numbers[row] = self.blocks[block], block
        scored = (numbers >= 0)[:, None].expand(-1, self.blocks.length)  # (B, T)
        return {"tokens": tokens, "index": numbers, "scored": scored}


class BatchLoader:
    """Iterates over the items of a dataset of batches in order, with a state from which it can resume.

    It is not a `DataLoader`, because Lightning would replace the sampler. The state is the number of samples that
    all ranks together have received, without batches that workers have loaded ahead. A run can therefore resume with
    another number of ranks, workers or accumulation steps, unlike with torchdata's `StatefulDataLoader`.

    Args:
        batches: Dataset whose items are whole batches.
        samples: Samples in one batch of all ranks together.
        workers: Number of processes that load batches ahead; 0 to load in this process.
        pin_memory: Whether to copy batches to page-locked memory, for faster transfer to a GPU.
    """

    def __init__(self, batches: Dataset[Batch], samples: int, workers: int = 0, pin_memory: bool = False) -> None:
        assert isinstance(batches, Sized)
        self.batches, self.samples, self.workers, self.pin_memory = batches, samples, workers, pin_memory
        self.start = self.done = 0  # batches before this epoch, and in it
        self.resumed = False

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        if not self.resumed or self.done >= len(self):
            self.start, self.done = self.start + self.done, 0
        self.resumed = False
        numbers = range(self.start + self.done, self.start + len(self))
        loader = _load(self.batches, numbers, self.workers, self.pin_memory)
        for batch in loader:
            self.done += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Numbers of samples that all ranks together received before this epoch and in it."""
        return {"samples_before_epoch": self.start * self.samples, "samples_in_epoch": self.done * self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the number of samples in `state`.

        Raises:
            UserError: The number is not a multiple of the samples in a batch.
        """
        before, inside = (state[f"samples_{when}_epoch"] for when in ("before", "in"))
        if before % self.samples or inside % self.samples:
            raise UserError(
                f"data.batch_size: got {self.samples} samples on all devices, but the checkpoint was written after "
                f"{before} + {inside} samples; use the batch size and devices of the earlier run"
            )
        self.start, self.done, self.resumed = before // self.samples, inside // self.samples, True


class EvaluationLoader:
    """Iterates over all items of a dataset of batches in order, always from the first one.

    Args:
        batches: Dataset whose items are whole batches.
        pin_memory: Whether to copy batches to page-locked memory, for faster transfer to a GPU.
    """

    def __init__(self, batches: Dataset[Batch], pin_memory: bool = False) -> None:
        self.batches, self.pin_memory = batches, pin_memory

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        yield from _load(self.batches, range(len(self)), 0, self.pin_memory)


def _load(batches: Dataset[Batch], numbers: range, workers: int, pin_memory: bool) -> DataLoader[Batch]:
    return DataLoader(
        batches,
        batch_size=None,
        sampler=numbers,
        num_workers=workers,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # a DataLoader draws a seed; the default generator is left to the model
        worker_init_fn=_start_worker,
    )


def _start_worker(worker: int) -> None:
    """Load in one thread, and leave SIGINT and SIGHUP to the training process."""
    torch.set_num_threads(1)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
