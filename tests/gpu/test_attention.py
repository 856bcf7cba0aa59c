"""Attention on a GPU against fp64, for several dtypes, head dimensions, lengths, windows and layouts."""

import pytest
import torch
from torch import Tensor

from kerple.attention import AttentionSpec, attend, backend_selection
from kerple.attention.cuda import attend_flex
from kerple.attention.reference import attend_reference
from tests.attention.test_flex_on_cpu import by_definition, first_keys, tensors
from tests.gpu.conftest import memory_below

# relative error of norms; rounding to bf16 and fp16 changes one number by at most 4e-3 and 5e-4 of its value
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
HEADS = 3


@pytest.fixture(autouse=True)
def _without_earlier_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_selection, "backends_used", {})


def forward_backward(inputs: list[Tensor], grad: Tensor, attention=attend, **options) -> list[Tensor]:
    """Return the output and the gradients of q, k, v and the table."""
    out = attention(*inputs[:3], AttentionSpec(table=inputs[3], **options))
    return [out, *torch.autograd.grad(out, inputs, grad)]


def compare_with_fp64(inputs: list[Tensor], grad: Tensor, window: int | None, **options) -> None:
    results = forward_backward(inputs, grad, window=window, **options)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = forward_backward(exact, grad.double(), attend_reference, window=window, **options)
    for name, ours, theirs in zip(("out", "dq", "dk", "dv", "dtable"), results, expected, strict=True):
        # with a window of 1, the softmax of one score has no gradient, only rounding errors
        size = theirs.norm().maximum(grad.double().norm()) if window == 1 else theirs.norm()
        assert (ours.double() - theirs).norm() <= TOLERANCE[grad.dtype] * size, name


@pytest.mark.parametrize("view", [False, True], ids=["contiguous", "view"])
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("length", [17, 127, 128, 129, 512, 1000, 2048])
@pytest.mark.parametrize("dim", [16, 32, 64, 80, 96, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_out_dq_dk_dv_and_dtable_are_those_of_fp64(dtype, dim, length, window, view, device) -> None:
    inputs, grad = tensors(length, HEADS, HEADS, dim, dim, dtype, view, device)
    compare_with_fp64(inputs, grad, window)
    assert [b.name for b in backend_selection.backends_used] == ["flex" if device.type == "cuda" else "tiles"]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("length", [127, 600, 2048])
def test_documents_are_attended_separately(length: int, window: int | None, device) -> None:
    inputs, grad = tensors(length, HEADS, HEADS, 64, 64, torch.bfloat16, True, device)
    compare_with_fp64(inputs, grad, window, first_key=first_keys(length, [[0, 3, 100, length // 2], [0]], device))


@pytest.mark.parametrize("groups", [1, 2])
def test_query_heads_that_share_a_key_head_need_no_copies_of_it(groups: int, device) -> None:
    if device.type != "cuda":
        pytest.skip("FlexAttention does not train on a CPU; tests/attention/test_flex_on_cpu.py tests it there")
    inputs, grad = tensors(300, 4, groups, 64, 64, torch.bfloat16, False, device)
    grad_lse = torch.randn(2, 4, 300, device=device)
    results = attend_flex(*inputs, None, 1 / 8, differentiable_lse=True)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected, gradients = by_definition(*exact, None, 1 / 8), torch.autograd.grad(results, inputs, (grad, grad_lse))
    expected_gradients = torch.autograd.grad(expected, exact, (grad.double(), grad_lse.double()))
    for ours, theirs in zip((*results, *gradients), (*expected, *expected_gradients), strict=True):
        assert (ours.double() - theirs).norm() <= 2e-2 * theirs.norm()


@pytest.mark.parametrize("length", [300, 2048])
def test_two_calls_are_equal_in_every_bit(length: int, device) -> None:
    inputs, grad = tensors(length, HEADS, HEADS, 64, 64, torch.bfloat16, True, device)
    assert all(map(torch.equal, forward_backward(inputs, grad), forward_backward(inputs, grad)))


def test_memory_of_16384_tokens_grows_with_the_length_and_not_its_square(device) -> None:
    length = 16384 if device.type == "cuda" else 1024
    inputs, grad = tensors(length, HEADS, HEADS, 64, 64, torch.bfloat16, False, device)
    forward_backward(inputs, grad)  # compiles the kernels
    with memory_below(20 * grad.nbytes, device):  # ``grad`` has 12 MiB; one head's scores in bf16 would have 512 MiB
        forward_backward(inputs, grad)


def test_grouped_heads_in_fp32_store_no_scores(device) -> None:
    length = 16384 if device.type == "cuda" else 1024
    q, k = (torch.randn(1, heads, length, 64, device=device) for heads in (8, 2))
    with torch.no_grad(), memory_below(8 * q.nbytes, device):  # one head's scores have 32 times the bytes of q
        out = attend(q, k, k)
    several = k.repeat_interleave(4, 1)
    torch.testing.assert_close(out, attend(q, several, several))
