"""Text to score other than consecutive blocks: blocks inside documents, and the paper's shuffled segments."""

from typing import Any, Protocol

import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.utils.data import Dataset

from kerple.base.errors import UserError


class Stream(Protocol):
    """The tokens of a split, such as `kerple.data.shards.TokenStream`."""

    def __len__(self) -> int: ...

    def read(self, start: int, count: int) -> Any:
        """Tokens start..start + count - 1 as an array of integers (count,)."""
        ...


class DocumentBlocks(Dataset[dict[str, Any]]):
    """Dataset of blocks of ``length`` targets, each inside one document and cut from its first token on.

    Documents of ``length`` tokens or fewer are left out. An item is {"tokens": (length + 1,) int64, "index": i}, as
    those of a data module's ``blocks``.

    Args:
        stream: The tokens of a split.
        begins: Index of the first token of each document, ascending; the last document ends with the stream.
        length: Targets in a block.

    Attributes:
        documents: Which document each block is of, (blocks,) int64, ascending.

    Raises:
        UserError: If no document is long enough for a block.
    """

    def __init__(self, stream: Stream, begins: ArrayLike, length: int) -> None:
        self.stream, self.length = stream, length
        begin = torch.as_tensor(begins, dtype=torch.int64)
        sizes = torch.diff(begin, append=torch.tensor([len(stream)]))
        counts = ((sizes - 1) // length).clamp(min=0)  # blocks in each document
        if not int(counts.sum()):
            longest = int(sizes.max()) if len(sizes) else 0
            raise UserError(
                f"documents: got true, but no document has the {length + 1} tokens of a block, the longest has "
                f"{longest}; use shorter lengths, a split with longer documents, or documents: false"
            )
        self.documents = torch.repeat_interleave(torch.arange(len(counts)), counts)
        within = torch.arange(len(self.documents)) - (counts.cumsum(0) - counts)[self.documents]
        self.starts = begin[self.documents] + within * length

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self.starts):
            raise IndexError(index)
        tokens = self.stream.read(int(self.starts[index]), self.length + 1)
        return {"tokens": torch.as_tensor(tokens.astype("int64")), "index": index}


def shuffled(count: int, chosen: int, seed: int) -> Tensor:
    """The first ``chosen`` entries of a permutation of 0..count-1 that the seed determines; (chosen,) int64.

    Raises:
        UserError: If ``chosen`` is larger than ``count``.
    """
    if chosen > count:
        raise UserError(f"segments: got {chosen}, but there are only {count}; lower segments or use a larger split")
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:chosen]
