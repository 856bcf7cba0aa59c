"""Attention on a GPU against fp64, whatever its dtype, head, length, window and layout."""

import pytest
import torch
from torch import Tensor

from kerple.attention import Modifiers, attend, backend
from kerple.attention.reference import attend_reference

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}  # of a norm; rounding is 4e-3 and 5e-4 an entry
HEADS = 3


@pytest.fixture(autouse=True)
def _new_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "used", {})


def used() -> list[str]:
    return [b.name for b in backend.used]


def fused(device: torch.device) -> list[str]:
    """The backend that a learned table should have here."""
    return ["flex"] if device.type == "cuda" else ["tiles"]


def tensors(length: int, dim: int, dtype: torch.dtype, view: bool, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """q, k, v of 2 sequences and a table longer than them, that want gradients; the gradient of the output."""
    shape = (4, 2, length, HEADS, dim) if view else (4, 2, HEADS, length, dim)
    rows = torch.randn(shape, dtype=torch.float64, device=device).to(dtype)
    q, k, v, grad = rows.transpose(2, 3) if view else rows
    table = torch.randn(HEADS, length + 3, device=device)
    return [x.detach().requires_grad_() for x in (q, k, v, table)], grad


def forward_backward(inputs: list[Tensor], grad: Tensor, window: int | None = None) -> list[Tensor]:
    """Output and the gradients of q, k, v and the table."""
    out = attend(*inputs[:3], Modifiers(table=inputs[3], window=window))
    return [out, *torch.autograd.grad(out, inputs, grad)]


@pytest.mark.parametrize("view", [False, True], ids=["contiguous", "view"])
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("length", [17, 127, 128, 129, 512, 1000, 2048])
@pytest.mark.parametrize("dim", [16, 32, 64, 80, 96, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_out_dq_dk_dv_and_dtable_are_those_of_fp64(dtype, dim, length, window, view, device) -> None:
    inputs, grad = tensors(length, dim, dtype, view, device)
    got = forward_backward(inputs, grad, window)
    assert used() == fused(device)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    right = attend_reference(*exact[:3], Modifiers(table=exact[3], window=window))
    wanted = [right, *torch.autograd.grad(right, exact, grad.double())]
    for name, ours, theirs in zip(("out", "dq", "dk", "dv", "dtable"), got, wanted, strict=True):
        size = theirs.norm()
        if window == 1:  # the softmax of one score has no gradient: what is left is rounding
            size = size.maximum(grad.double().norm())
        assert (ours.double() - theirs).norm() <= TOLERANCE[dtype] * size, name


@pytest.mark.parametrize("groups", [1, 2])
def test_query_heads_that_share_a_key_head_need_no_copies_of_it(groups: int, device) -> None:
    from kerple.attention.cuda import attend_flex

    if device.type != "cuda":
        pytest.skip("FlexAttention does not train on a CPU; tests/attention/test_flex_on_cpu.py has it do so")
    q, k, v = (torch.randn(2, h, 300, 64, dtype=torch.bfloat16, device=device) for h in (4, groups, groups))
    inputs = [x.requires_grad_() for x in (q, k, v, torch.randn(4, 300, device=device))]
    grad, grad_lse = torch.randn_like(q), torch.randn(2, 4, 300, device=device)
    got = attend_flex(*inputs, None, differentiable_lse=True)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    k, v = (x.repeat_interleave(4 // groups, 1) for x in exact[1:3])
    index = torch.arange(300, device=device)
    s = exact[0] @ k.mT / 8 + exact[3][:, (index[:, None] - index).clamp(min=0)]
    s = s.masked_fill(index[:, None] < index, float("-inf"))
    right = (s.softmax(-1) @ v, s.logsumexp(-1))
    wanted = torch.autograd.grad(right, exact, (grad.double(), grad_lse.double()))
    for ours, theirs in zip(
        (*got, *torch.autograd.grad(got, inputs, (grad, grad_lse))), (*right, *wanted), strict=True
    ):
        assert (ours.double() - theirs).norm() <= 2e-2 * theirs.norm()


def test_fp32_takes_the_fallback(device) -> None:
    inputs, grad = tensors(300, 64, torch.float32, True, device)
    got = forward_backward(inputs, grad)
    assert used() == (["blocks"] if device.type == "cuda" else ["tiles"])
    exact = [x.detach().double().requires_grad_() for x in inputs]
    right = attend_reference(*exact[:3], Modifiers(table=exact[3]))
    for ours, theirs in zip(got, [right, *torch.autograd.grad(right, exact, grad.double())], strict=True):
        assert (ours.double() - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.parametrize("length", [300, 2048])
def test_two_calls_are_equal_in_every_bit(length: int, device) -> None:
    inputs, grad = tensors(length, 64, torch.bfloat16, True, device)
    for ours, again in zip(forward_backward(inputs, grad), forward_backward(inputs, grad), strict=True):
        assert torch.equal(ours, again)


def test_memory_of_16384_tokens_grows_with_the_length_and_not_its_square(device) -> None:
    length = 16384 if device.type == "cuda" else 1024
    shape = (1, 12, length, 64)
    inputs = [torch.randn(shape, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(3)]
    inputs.append(torch.randn(12, length, device=device, requires_grad=True))
    grad = torch.randn(shape, dtype=torch.bfloat16, device=device)
    forward_backward(inputs, grad)  # compiles
    if device.type != "cuda":
        return
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    forward_backward(inputs, grad)
    peak = torch.cuda.max_memory_allocated() - before
    one_tensor = grad.numel() * grad.element_size()  # 24 MiB; one head's scores in bf16 would be 512
    assert peak < 20 * one_tensor


def test_grouped_heads_in_fp32_write_no_scores_down(device) -> None:
    length = 16384 if device.type == "cuda" else 1024
    q = torch.randn(1, 8, length, 64, device=device)
    k = torch.randn(1, 2, length, 64, device=device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with torch.no_grad():
        out = attend(q, k, k)
    if device.type == "cuda":  # one head's scores are 32 times as much as q
        assert torch.cuda.max_memory_allocated() - before < 8 * q.numel() * q.element_size()
    several = k.repeat_interleave(4, 1)
    torch.testing.assert_close(out, attend(q, several, several))
