"""`attend_flex`, the attention of a GPU, compiled and run forward and backward on the CPU.

FlexAttention refuses to train on the CPU. Its reference implementation can train there if two private checks are
removed. Inductor has no kernels for it, so that the graph of AOTAutograd is run.
"""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.attention.flex_attention as library
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from kerple.attention import cuda


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """Let FlexAttention train on the CPU, and yield the counter of compiled graphs."""
    original = library._apply_kernel_options

    def with_lse(*args: object) -> dict[str, object]:
        return {**original(*args), "OUTPUT_LOGSUMEXP": True}  # type: ignore[arg-type]

    monkeypatch.setattr(library, "_validate_device", lambda *_: None)
    monkeypatch.setattr(library, "_apply_kernel_options", with_lse)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(cuda.flex, dynamic=False, fullgraph=True, backend=counter)
    monkeypatch.setattr(cuda, "compiled_flex", lambda: compiled)
    cuda.causal_mask.cache_clear()
    with torch._dynamo.config.patch(recompile_limit=cuda.RECOMPILATIONS):
        yield counter
    torch._dynamo.reset()


def tensors(length: int, heads: int, groups: int, dim: int, v_dim: int, dtype: torch.dtype, view: bool) -> list[Tensor]:
    """Return q, k, v, a table with more than T entries, and a gradient."""
    shapes = [(heads, dim), (groups, dim), (groups, v_dim), (heads, v_dim)]
    rows = [torch.randn(2, length, h, d).to(dtype).transpose(1, 2) for h, d in shapes]
    q, k, v, grad = rows if view else (x.contiguous() for x in rows)
    return [q, k, v, torch.randn(heads, length + 3), grad]


def by_definition(q: Tensor, k: Tensor, v: Tensor, table: Tensor, window: int | None, scale: float) -> list[Tensor]:
    """Return output and log-sum-exp of explicit attention."""
    index = torch.arange(q.shape[2], device=q.device)
    distance = index[:, None] - index
    hidden = (distance < 0) | (distance >= (window or len(index)))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.mT * scale + table[:, distance.clamp(min=0)]
    s = s.masked_fill(hidden, float("-inf"))
    return [s.softmax(-1) @ v, s.logsumexp(-1)]


@pytest.mark.parametrize(
    ("length", "heads", "groups", "dim", "v_dim", "window", "dtype", "view"),
    [
        (200, 4, 2, 32, 16, 129, torch.float32, True),  # padded to 256
        (65, 2, 1, 20, 20, 1, torch.float32, False),
        (130, 2, 2, 16, 16, None, torch.bfloat16, True),
    ],
)
def test_output_log_sum_exp_and_gradients_are_those_of_fp64(
    length, heads, groups, dim, v_dim, window, dtype, view, monkeypatch
) -> None:
    added = []
    # `test_cuda` tests this kernel
    monkeypatch.setattr(cuda.AddTableGradient, "apply", lambda out, lse, *rest: added.append(rest) or (out, lse))
    *inputs, grad = tensors(length, heads, groups, dim, v_dim, dtype, view)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    inputs = [x.requires_grad_() for x in inputs]
    grad_lse = torch.randn(grad.shape[:3])
    out, lse = cuda.attend_flex(*inputs, window, 0.3, differentiable_lse=True)
    theirs = by_definition(*exact, window, 0.3)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    got = torch.autograd.grad((out, lse), inputs[:3], (grad, grad_lse))
    expected = torch.autograd.grad(theirs, exact[:3], (grad.double(), grad_lse.double()))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for ours, right in zip((out, lse, *got), (*theirs, *expected), strict=True):
        assert (ours.double() - right).norm() <= tolerance * right.norm()
    assert len(added) == 1
    assert [x.shape for x in added[0][:3]] == [x.shape for x in inputs[:3]]
    assert not any(x.requires_grad for x in added[0][:3])


def test_each_padded_length_and_window_compiles_one_graph(graphs) -> None:
    for length, window in ((40, None), (40, 100), (128, None), (200, None)):
        q, k, v, table, _ = tensors(length, 2, 2, 16, 16, torch.float32, False)
        with torch.no_grad():
            cuda.attend_flex(q, k, v, table, window, 0.25, False)
    assert graphs.frame_count == 3


def test_more_graphs_than_the_limit_raise() -> None:
    torch._dynamo.reset()  # graphs of other tests would count
    # the message of torch depends on earlier compilations with fullgraph
    limit = r"(fullgraph=True|fail_on_recompile_limit_hit)\nuse --model.attention blocks"
    inputs = [tensors(length, 1, 1, 16, 16, torch.float32, False)[:4] for length in (128, 256, 384)]
    with torch._dynamo.config.patch(recompile_limit=2):
        for tensors_of_length in inputs[:2]:
            cuda.attend_flex(*tensors_of_length, None, 0.25, False)
        with pytest.raises(Exception, match=limit):
            cuda.attend_flex(*inputs[2], None, 0.25, False)
