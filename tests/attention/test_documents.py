"""Attention within documents, against explicit attention to each document as a separate input."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kerple.attention import AttentionSpec, attend, cpu_documents
from kerple.attention.backend_selection import AttentionOption
from kerple.attention.reference import attend_reference
from tests.attention.test_flex_on_cpu import first_keys

HEADS, DIM = 3, 8


def inputs(batch: int, queries: int, keys: int) -> list[Tensor]:
    """Return q, k, v, a table and a sink in fp64, which require gradients."""
    shapes = [(batch, HEADS, queries, DIM), *[(batch, HEADS, keys, DIM)] * 2, (HEADS, keys), (HEADS,)]
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def each_document(leaves: list[Tensor], starts: list[list[int]], spec: AttentionSpec) -> Tensor:
    """Return the outputs (B, H, Tq, δ) of explicit attention to one document at a time."""
    q, k, v, table, sink = leaves
    queries, length = q.shape[2], k.shape[2]
    sequences = []
    for b, row in enumerate(starts):
        outputs = []
        for start, stop in pairwise([*row, length]):
            if (first := max(start, length - queries)) < stop:
                part = q[b : b + 1, :, first - length + queries : stop - length + queries]
                keys = slice(start, stop)
                document = replace(spec, table=table, sink=sink)
                outputs.append(attend_reference(part, k[b : b + 1, :, keys], v[b : b + 1, :, keys], document))
        sequences.append(torch.cat(outputs, 2))
    return torch.cat(sequences)


CASES = [  # first rows of the documents of each sequence, queries, keys
    ([[0, 3, 20], [0, 1, 2]], 40, 40),
    ([[0, 90, 100], [0, 1, 150]], 170, 170),
    ([[0, 200, 299], [0]], 300, 300),  # sequences are attended one by one
    ([[0, 10, 295]], 30, 300),
    ([[0, 130, 131, 520]], 600, 600),
    ([[0, 5]], 1, 20),
]


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("option", ["auto", "blocks", "reference"])
@pytest.mark.parametrize(("starts", "queries", "keys"), CASES)
def test_each_document_is_attended_as_a_separate_input(
    option: AttentionOption, window: int | None, starts: list[list[int]], queries: int, keys: int
) -> None:
    leaves = inputs(len(starts), queries, keys)
    spec = AttentionSpec(window=window)
    q, k, v, table, sink = leaves
    documents = replace(spec, table=table, sink=sink, first_key=first_keys(keys, starts)[:, keys - queries :])
    out, expected = attend(q, k, v, documents, option), each_document(leaves, starts, spec)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    grad = torch.randn_like(out)
    got, wanted = (torch.autograd.grad(x, leaves, grad) for x in (out, expected))
    torch.testing.assert_close(got, wanted, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("change", [{"first_keys": 2, "window": 5}, {"neighbor_window": 4}])
def test_first_keys_and_halves_count_from_the_first_token_of_a_document(change: dict) -> None:
    starts, spec = [[0, 3, 20], [0, 9, 33]], AttentionSpec(**change)
    leaves = inputs(2, 40, 40)
    q, k, v, table, sink = leaves
    if "neighbor_window" in change:
        v = leaves[2] = v.detach()[..., : DIM // 2]
    documents = replace(spec, table=table, sink=sink, first_key=first_keys(40, starts))
    torch.testing.assert_close(attend(q, k, v, documents), each_document(leaves, starts, spec), atol=1e-12, rtol=1e-12)


def test_plain_attention_in_bf16_and_a_padding_token_that_sees_only_itself() -> None:
    q, k, v, *_ = (x.detach().bfloat16() for x in inputs(2, 60, 60))
    padding = torch.tensor([[60] * 5 + [5] * 55, [0] * 60])
    out = attend(q, k, v, AttentionSpec(first_key=padding))
    torch.testing.assert_close(out[0, :, :5], v[0, :, :5])
    alone = attend_reference(q[:1, :, 5:].double(), k[:1, :, 5:].double(), v[:1, :, 5:].double())
    torch.testing.assert_close(out[:1, :, 5:].double(), alone, atol=2e-2, rtol=2e-2)


def test_no_mask_is_larger_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, original = [], cpu_documents.toeplitz
    monkeypatch.setattr(cpu_documents, "toeplitz", lambda *a: sizes.append(original(*a).shape) or original(*a))
    q, k, v, table, _ = (x.detach() for x in inputs(1, 2000, 2000))
    attend(q, k, v, AttentionSpec(table=table, first_key=first_keys(2000, [[0, 300, 1000, 1500]])))
    assert sum(rows for _, rows, _ in sizes) == 2000
    assert max(keys for *_, keys in sizes) <= 700 + cpu_documents.QUERIES_AT_ONCE
