"""Blocks inside documents against a loop over documents, and the shuffle of the paper's sampling."""

import numpy as np
import pytest
import torch

from kerple.evaluation.segments import DocumentBlocks


class Counting:
    """Token t is t."""

    def __len__(self) -> int:
        return 300

    def read(self, start: int, count: int) -> np.ndarray:
        return np.arange(start, start + count, dtype=np.uint16)


@pytest.mark.parametrize("length", [1, 7, 30, 100])
def test_blocks_tile_each_document_and_cross_no_border(length: int) -> None:
    begins = [0, 1, 3, 40, 40, 75, 106, 207]  # one document is empty
    blocks = DocumentBlocks(Counting(), np.array(begins, dtype=np.uint64).astype(np.int64), length)
    expected, documents = [], []
    for document, (begin, end) in enumerate(zip(begins, [*begins[1:], 300], strict=True)):
        start = begin
        while start + length + 1 <= end:
            expected.append(list(range(start, start + length + 1)))
            documents.append(document)
            start += length
    assert [blocks[i]["tokens"].tolist() for i in range(len(blocks))] == expected
    assert blocks.documents.tolist() == documents
    assert blocks[0]["tokens"].dtype == torch.int64
    few = DocumentBlocks(Counting(), begins, length, limit=1)
    assert [few[i]["tokens"].tolist() for i in range(len(few))] == expected[:1]
    assert few.documents.tolist() == documents[:1]
    with pytest.raises(IndexError):
        blocks[len(blocks)]
    allowed = np.arange(len(begins)) % 2 == 0
    some = DocumentBlocks(Counting(), begins, length, allowed=allowed)
    assert [some[i]["tokens"].tolist() for i in range(len(some))] == [
        tokens for tokens, document in zip(expected, documents, strict=True) if allowed[document]
    ]
    assert some.left_out == len({document for document in documents if not allowed[document]})


def test_documents_that_are_all_too_short_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"at least 1 blocks of 121 tokens .* the longest document has 120"):
        DocumentBlocks(Counting(), [0, 60, 180], 120)
