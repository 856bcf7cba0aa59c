"""Datasets and loaders: samples by number, batches by step, the place in the run as state."""

from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from kerple.data.order import Mixture
from kerple.data.shards import TokenStream
from kerple.errors import UserError

Batch = dict[str, Any]


class TrainingBatches(Dataset[Batch]):
    """Item i: this rank's share of the i-th micro-batch of the run, {"tokens": (B, T + 1) int64}.

    Micro-batch i of all ranks together is samples i·W·B .. (i + 1)·W·B - 1 in order, rank r has the r-th B of them. So
    the samples of an optimiser step depend on the global batch alone, not on how ranks and accumulation divide it.

    Args:
        streams: Token streams, one a corpus of the mixture.
        order: Sample number to stream and place.
        length: Targets a sample, T.
        batch_size: Samples a rank and micro-batch, B.
        batches: Micro-batches in the run.
        rank, ranks: This process and how many there are, W.
    """

    def __init__(
        self,
        streams: list[TokenStream],
        order: Mixture,
        length: int,
        batch_size: int,
        batches: int,
        rank: int,
        ranks: int,
    ) -> None:
        self.streams, self.order, self.length = streams, order, length
        self.batch_size, self.batches, self.rank, self.ranks = batch_size, batches, rank, ranks

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> Batch:
        first = (index * self.ranks + self.rank) * self.batch_size
        streams, starts = self.order.locate(np.arange(first, first + self.batch_size))
        tokens = np.empty((self.batch_size, self.length + 1), np.int64)  # (B, T + 1)
        for row, (stream, start) in enumerate(zip(streams, starts, strict=True)):
            tokens[row] = self.streams[stream].read(int(start), self.length + 1)
        return {"tokens": torch.from_numpy(tokens)}


class Blocks(Dataset[dict[str, Any]]):
    """Item i: {"tokens": (length + 1,) int64, "index": i}, targets i·length + 1 .. (i + 1)·length of the stream.

    Disjoint and complete: every token but the first is a target once, up to the ragged end, which is dropped.

    Args:
        stream: Tokens of a split.
        length: Targets a block.
        limit: At most so many blocks, from the beginning; None: all.
    """

    def __init__(self, stream: TokenStream, length: int, limit: int | None = None) -> None:
        self.stream, self.length = stream, length
        available = max(len(stream) - 1, 0) // length
        self.blocks = available if limit is None else min(limit, available)

    def __len__(self) -> int:
        return self.blocks

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.blocks:
            raise IndexError(index)
        tokens = self.stream.read(index * self.length, self.length + 1).astype(np.int64)
        return {"tokens": torch.from_numpy(tokens), "index": index}


class BlockBatches(Dataset[Batch]):
    """Blocks in batches, dealt to the ranks in turn, each rank the same number of batches.

    Where the blocks do not come out even, the last rows are fillers: "index" is -1, "scored" (where given) False.
    Nothing is ever repeated, so that sums over ranks are those of one process.

    Args:
        blocks: What to batch.
        batch_size: Rows.
        rank, ranks: This process and how many there are.
        scored: Add {"scored": (B, T) bool}.
    """

    def __init__(self, blocks: Blocks, batch_size: int, rank: int, ranks: int, scored: bool = False) -> None:
        self.blocks, self.batch_size, self.rank, self.ranks, self.scored = blocks, batch_size, rank, ranks, scored

    def __len__(self) -> int:
        return -(-len(self.blocks) // (self.batch_size * self.ranks))

    def __getitem__(self, index: int) -> Batch:
        first = (index * self.ranks + self.rank) * self.batch_size
        tokens = torch.zeros(self.batch_size, self.blocks.length + 1, dtype=torch.int64)  # (B, T + 1)
        numbers = torch.full((self.batch_size,), -1)
        for row, block in enumerate(range(first, min(first + self.batch_size, len(self.blocks)))):
            tokens[row], numbers[row] = self.blocks[block]["tokens"], block
        batch: Batch = {"tokens": tokens, "index": numbers}
        if self.scored:
            batch["scored"] = (numbers >= 0)[:, None].expand(-1, self.blocks.length)  # (B, T)
        return batch


class BatchLoader:
    """Loads items of a dataset of batches in order, from where it stopped.

    It is no DataLoader by type, so that Lightning leaves the order alone. Its state is the number of samples that all
    ranks together were given, not what workers fetched ahead, so that another number of ranks, workers or accumulation
    steps can go on from it. torchdata's StatefulDataLoader keeps the states of the workers of one rank instead.

    Args:
        batches: Dataset whose items are whole batches.
        samples: Samples in one item over all ranks together.
        workers: Processes that load ahead; 0: this one does it.
        pin_memory: Copy batches to page-locked memory, for faster transfer to a GPU.
    """

    def __init__(self, batches: Dataset[Batch], samples: int, workers: int = 0, pin_memory: bool = False) -> None:
        assert isinstance(batches, Sized)
        self.batches, self.samples, self.workers, self.pin_memory = batches, samples, workers, pin_memory
        self.start = self.done = 0  # batches before this epoch, and in it
        self.resumed = False

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

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
        return {"samples_before_epoch": self.start * self.samples, "samples_in_epoch": self.done * self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after the samples of `state`.

        Raises:
            UserError: They are no whole number of batches of this size.
        """
        before, inside = state["samples_before_epoch"], state["samples_in_epoch"]
        if before % self.samples or inside % self.samples:
            raise UserError(
                f"batch_size: the run stopped after {before + inside} samples, which is no multiple of the "
                f"{self.samples} that all devices now take together; choose batch_size and devices so that it is"
            )
        self.start, self.done, self.resumed = before // self.samples, inside // self.samples, True


class EvaluationLoader:
    """Loads all items of a dataset of batches, in order, each time it is iterated.

    Args:
        batches: Dataset whose items are whole batches.
        workers: Processes that load ahead.
        pin_memory: As in `BatchLoader`.
    """

    def __init__(self, batches: Dataset[Batch], workers: int = 0, pin_memory: bool = False) -> None:
        self.batches, self.workers, self.pin_memory = batches, workers, pin_memory

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        yield from _load(self.batches, range(len(self)), self.workers, self.pin_memory)


def _load(batches: Dataset[Batch], numbers: range, workers: int, pin_memory: bool) -> DataLoader[Batch]:
    return DataLoader(
        batches,
        batch_size=None,
        sampler=numbers,
        num_workers=workers,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # a DataLoader draws a seed, which would move the model's random state
        worker_init_fn=_one_thread,
    )


def _one_thread(worker: int) -> None:
    torch.set_num_threads(1)
