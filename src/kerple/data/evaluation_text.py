"""`Text`: the text on which a model is measured, from shards, an array of token ids, or strings."""

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike, NDArray
from tokenizers import Tokenizer
from torch import Tensor

from kerple.base.errors import UserError, require
from kerple.data.documents import Documents
from kerple.data.shards import Folder, Tokens, TokenStream
from kerple.data.tokenizer import encode, end_of_text, token_bytes


@dataclass(eq=False)
class TextBlocks(Sequence[Tensor]):
    """Blocks of consecutive tokens of a text. Item i is (length + 1,) int64: ``length`` inputs and their targets.

    Args:
        stream: The tokens of the text.
        starts: Index of the first token of each block, (blocks,) int64.
        length: Number of targets in a block.
        documents: Index of the document of each block, (blocks,) int64; None if these indices are not known.
        left_out: Number of documents without blocks because their overlap with the training text is too large.
        too_short: Number of documents without blocks because they have at most ``length`` tokens.
        boundaries: Documents of the text, of whose keys queries see only those of their own; None if a block is one
            document.
    """

    stream: TokenStream | Tokens
    starts: Tensor
    length: int
    documents: Tensor | None = None
    left_out: int = 0
    too_short: int = 0
    boundaries: Documents | None = None

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: Any) -> Any:  # only integers; slices are not supported
        if not 0 <= index < len(self.starts):
            raise IndexError(index)
        start = int(self.starts[index])
        return torch.as_tensor(self.stream[start : start + self.length + 1].astype("int64"))

    def subset(self, indices: Sequence[int]) -> "TextBlocks":
        """Return the blocks with these indices. The result has no indices of documents."""
        return TextBlocks(self.stream, self.starts[list(indices)], self.length, boundaries=self.boundaries)

    def document_options(self, index: int, device: torch.device | None = None) -> dict[str, Tensor]:
        """Return the argument ``documents`` of `SupportsDocuments.losses` for a block, or nothing for one document."""
        if self.boundaries is None:
            return {}
        entries = self.boundaries.entries(self.starts[index : index + 1].numpy(), self.length + 1)
        return {"documents": entries["documents"].to(device)}


class Text:
    """A text on which models are measured.

    Args:
        tokens: The token ids, (N,) integers.
        begins: Index of the first token of each document, ascending; None if documents are not known.
        tokenizer: The tokenizer for measures that need strings or bits per byte; None if no such measure is used.
        name: Name of the text in messages.
        mask_documents: Whether a query sees only keys of its document, as in a fit with ``data.mask_documents``. Blocks
            of `blocks` then have boundaries.

    Raises:
        UserError: Documents are to be masked but are not known, or ``begins`` are not ascending indices of tokens.

    Attributes:
        stream (TokenStream | NDArray): The tokens.
    """

    split = "text"
    """Name of the split, or ``text`` for a text that is not a split."""

    mask_documents: bool = False
    """Whether a query sees only keys of its document, so that blocks of `blocks` have boundaries."""

    table: pd.DataFrame | None = None
    """One row for each document, as in `Folder.test_documents`; None if groups and overlaps are not known.

    Columns: ``document`` is the document's name, ``group`` the name of its group (such as its package), and ``overlap``
    the fraction of the document's 32-grams (32 consecutive tokens) that also occur in the training text of its folder.
    """

    def __init__(
        self,
        tokens: ArrayLike,
        begins: ArrayLike | None = None,
        tokenizer: Tokenizer | None = None,
        name: str = "the text",
        mask_documents: bool = False,
    ) -> None:
        require(begins is not None or not mask_documents, "mask_documents", "true", "false without `begins`")
        self.mask_documents = mask_documents
        self.stream: TokenStream | Tokens = np.asarray(tokens)
        if begins is not None:
            rows = np.asarray(begins)
            valid = rows.ndim == 1 and rows.size > 0 and (np.diff(rows) >= 0).all() and 0 <= rows[0] <= rows[-1]
            valid = valid and rows[-1] < len(self.stream)
            require(bool(valid), "begins", rows.tolist(), f"ascending indices of the {len(self.stream)} tokens")
        self._begins, self._tokenizer, self.name = begins, tokenizer, name
        self._end: int | None = None

    @classmethod
    def of_strings(cls, texts: Iterable[str], tokenizer: Any, name: str = "the text", source: str = "") -> "Text":
        """Return a text of documents, each followed by the end-of-text token.

        Args:
            texts: The documents.
            tokenizer: A `tokenizers.Tokenizer`, or a fast tokenizer of transformers.
            name: Name of the text in messages.
            source: Source of the tokenizer, whose folder may declare its end-of-text token (`end_of_text`).

        Raises:
            UserError: The tokenizer has no end-of-text token.
        """
        declared = [end for end in [getattr(tokenizer, "eos_token", None)] if end]
        # a copy, because encoding changes its settings
        tokenizer = Tokenizer.from_str(getattr(tokenizer, "backend_tokenizer", tokenizer).to_str())
        end = end_of_text(tokenizer, source or "this tokenizer", declared)
        documents = [[*encode(tokenizer, text), end] for text in texts]
        begins = np.cumsum([0, *map(len, documents)])[:-1]
        text = cls(np.concatenate([np.empty(0, np.int64), *documents]), begins, tokenizer, name)
        text._end = end
        return text

    @property
    def begins(self) -> Tensor | None:
        """Index of the first token of each document, (documents,) int64, ascending; None if documents are not known."""
        return None if self._begins is None else torch.as_tensor(self._begins, dtype=torch.int64)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the text.

        Raises:
            UserError: The text has no tokenizer.
        """
        if self._tokenizer is None:
            raise UserError(f"{self.name} has no tokenizer; give Text the argument tokenizer")
        return self._tokenizer

    @property
    def end_of_text(self) -> int:
        """Id of the token after each document.

        Raises:
            UserError: The text has no tokenizer, or the tokenizer has no end-of-text token.
        """
        return end_of_text(self.tokenizer, self.name) if self._end is None else self._end

    @cached_property
    def token_bytes(self) -> Tensor | None:
        """Number of bytes of each token id, (vocabulary,) int64, 0 for special and end-of-text tokens.

        None without a tokenizer.
        """
        if self._tokenizer is None:
            return None
        sizes = torch.tensor(token_bytes(self._tokenizer))
        with suppress(UserError):  # the tokenizer has no end-of-text token
            sizes[self.end_of_text] = 0
        return sizes

    @cached_property
    def digest(self) -> str:
        """sha256 of the tokens as little-endian integers."""
        return hashlib.sha256(self.stream[:].astype("<i8").tobytes()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a string, without an end-of-text token."""
        return encode(self.tokenizer, text)

    def decode(self, tokens: list[int]) -> str:
        """Return the string of token ids; an end-of-text token becomes its name."""
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    def blocks(self, length: int, limit: int | None = None, fewer: bool = False) -> TextBlocks:
        """Return consecutive blocks from the beginning of the text.

        The first token of a block is the last target of the previous block.

        Args:
            length: Number of targets in a block.
            limit: Number of blocks; None for all.
            fewer: Whether a text with fewer than ``limit`` blocks is accepted. All its blocks are then returned.

        Raises:
            UserError: The text has no block, or has fewer than ``limit`` blocks and ``fewer`` is false.
        """
        available = max(len(self.stream) - 1, 0) // length
        needed = 1 if fewer else limit or 1
        advice = "a shorter length or a longer text" if needed == 1 else "fewer blocks, or a shorter length"
        given = f"{available} blocks of {length} targets in {self.name}"
        require(available >= needed, "blocks", given, f"at least {needed}; use {advice}")
        boundaries = None
        if self.mask_documents and (begins := self.begins) is not None:
            boundaries = Documents(begins.numpy())
        return TextBlocks(self.stream, torch.arange(available)[:limit] * length, length, boundaries=boundaries)

    def document_blocks(
        self,
        length: int,
        limit: int | None = None,
        overlap: float = 1.0,
        per_group: int | None = None,
        per_document: int | None = None,
    ) -> TextBlocks:
        """Return consecutive blocks inside single documents. The first block of a document begins with its first token.

        Args:
            length: Number of targets in a block. Documents of at most ``length`` tokens are left out.
            limit: Number of blocks, the first in the order of the text; None for all. If ``per_group`` leaves fewer
                blocks, all of these are returned.
            overlap: Documents with a larger overlap with the training text (see `table`) are left out.
            per_group: Number of blocks of each group of documents, the first ones of the group; None for all. A text
                without a `table` is one group.
            per_document: Largest number of blocks of each document, the first ones of the document; None for all.

        Raises:
            UserError: Documents are not known, a group has fewer than ``per_group`` blocks, or the text has no block or
                fewer than ``limit`` blocks before ``per_group`` is applied.
        """
        if (begins := self.begins) is None:
            advice = "use TokenShards, pass `begins` to Text, or set documents: false in Extrapolation"
            raise UserError(f"data: the documents of {self.name} are not known; {advice}")
        sizes = torch.diff(begins, append=torch.tensor([len(self.stream)]))
        counts = ((sizes - 1) // length).clamp(0, per_document)  # blocks in each document
        table = pd.DataFrame({"group": 0, "overlap": 0.0}, range(len(counts))) if self.table is None else self.table
        too_short = counts == 0
        left_out = torch.as_tensor(table["overlap"].to_numpy() > overlap) & ~too_short
        counts[left_out] = 0
        documents = torch.repeat_interleave(counts)  # index of each block's document
        given = f"{len(documents)} blocks of {length + 1} tokens that lie inside one document"
        longest = f"the longest document has {max(sizes.tolist(), default=0)} tokens"
        advice = "use shorter lengths, fewer blocks, or documents: false in Extrapolation"
        require(len(documents) >= (limit or 1), "data", given, f"at least {limit or 1}; {longest}; {advice}")
        # index of each block within its document
        index = torch.arange(len(documents)) - (counts.cumsum(0) - counts)[documents]
        starts = begins[documents] + index * length
        if per_group is not None:
            groups = table["group"].to_numpy()
            available = pd.Series(counts.numpy()).groupby(groups).sum()
            if available.min() < per_group:
                given = f"the group {available.idxmin()} has only {available.min()} blocks of {length + 1} tokens"
                advice = "decrease blocks_per_group, use shorter lengths, or increase blocks_per_document"
                raise UserError(f"blocks_per_group: got {per_group}, but {given}; {advice}")
            # index of each block within its group
            number = pd.Series(0, range(len(documents))).groupby(groups[documents.numpy()]).cumcount()
            is_first = torch.as_tensor(number.to_numpy() < per_group)
            starts, documents = starts[is_first], documents[is_first]
        numbers = int(left_out.sum()), int(too_short.sum())
        return TextBlocks(self.stream, starts[:limit], length, documents[:limit], *numbers)


class ShardText(Text):
    """The text of a split of a folder of shards.

    Args:
        folder: The folder.
        split: ``train``, ``validation`` or ``test``. Only ``test`` has a `table`.
        mask_documents: See `Text`.
    """

    def __init__(self, folder: Folder, split: str, mask_documents: bool = False) -> None:
        self.folder, self.split, self.mask_documents = folder, split, mask_documents
        self.stream = TokenStream(folder, split)
        self.name, self._end = f"the {split} split of {folder.location}", folder.manifest.end_of_text

    @cached_property
    def _begins(self) -> NDArray[np.int64]:  # type: ignore[override]
        return self.folder.documents(self.split)

    @cached_property
    def _tokenizer(self) -> Tokenizer:  # type: ignore[override]
        return self.folder.tokenizer()

    @cached_property
    def table(self) -> pd.DataFrame | None:  # type: ignore[override]
        return self.folder.test_documents() if self.split == "test" else None

    @cached_property
    def digest(self) -> str:
        return self.folder.manifest.splits[self.split].sha256


def shuffled(count: int, size: int, seed: int) -> list[int]:
    """Return the first ``size`` entries of a random permutation of 0 .. count - 1, which the seed determines.

    Raises:
        UserError: ``size`` is larger than ``count``.
    """
    require(size <= count, "segments", size, f"at most {count}, those of the split; use fewer, or a larger split")
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:size].tolist()
