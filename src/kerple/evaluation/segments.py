"""Texts to score that are not consecutive blocks: blocks inside documents, and the paper's shuffled segments."""

from typing import Any

import torch
from numpy.typing import ArrayLike
from torch.utils.data import Dataset

from kerple.base.errors import UserError


class DocumentBlocks(Dataset[dict[str, Any]]):
    """Dataset of blocks of ``length`` targets, each inside one document and cut from its first token on.

    Documents of ``length`` tokens or fewer are left out. An item is {"tokens": (length + 1,) int64}.

    Args:
        stream: The tokens of a split, such as `kerple.data.shards.TokenStream`, with `len` and ``read(start, count)``.
        begins: Index of the first token of each document, ascending; the last document ends with the stream.
        length: Targets in a block.
        limit: Number of blocks, the first of the split; None for all.
        allowed: Which documents may be read, (documents,) bool; None for all.

    Attributes:
        documents: Index of the document that each block is cut from, (blocks,) int64, ascending.
        left_out: Number of documents that are long enough for a block but may not be read.

    Raises:
        UserError: If there are fewer blocks than ``limit``, or none.
    """

    def __init__(
        self, stream: Any, begins: ArrayLike, length: int, limit: int | None = None, allowed: ArrayLike | None = None
    ) -> None:
        self.stream, self.length = stream, length
        begin = torch.as_tensor(begins, dtype=torch.int64)
        sizes = torch.diff(begin, append=torch.tensor([len(stream)]))
        counts = ((sizes - 1) // length).clamp(min=0)  # blocks in each document
        denied = torch.zeros(len(counts), dtype=torch.bool) if allowed is None else ~torch.as_tensor(allowed)
        self.left_out = int((denied & (counts > 0)).sum())
        counts[denied] = 0
        documents = torch.repeat_interleave(torch.arange(len(counts)), counts)
        if len(documents) < (limit or 1):
            raise UserError(
                f"documents: got true, expected at least {limit or 1} blocks of {length + 1} tokens in one document "
                f"each, there are {len(documents)}, and the longest document has {int(sizes.max())} tokens; use "
                "shorter lengths, fewer blocks, a split with longer documents, or documents: false"
            )
        # number of each block within its document
        within = torch.arange(len(documents)) - (counts.cumsum(0) - counts)[documents]
        self.documents = documents[:limit]
        self.starts = (begin[documents] + within * length)[:limit]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= len(self.starts):
            raise IndexError(index)
        tokens = self.stream.read(int(self.starts[index]), self.length + 1)
        return {"tokens": torch.as_tensor(tokens.astype("int64"))}


def shuffled(count: int, chosen: int, seed: int) -> list[int]:
    """The first ``chosen`` entries of a permutation of 0..count-1 that the seed determines.

    Raises:
        UserError: If ``chosen`` is larger than ``count``.
    """
    if chosen > count:
        raise UserError(f"segments: got {chosen}, but there are only {count}; lower segments or use a larger split")
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:chosen].tolist()
