"""`attend_flex`, the attention of a GPU, compiled and run forward and backward on the CPU.

FlexAttention refuses to train on the CPU. Its reference implementation can train there after changes of two private
functions. Inductor has no CPU kernels for training with FlexAttention. Therefore the graphs of AOTAutograd are run.
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
    with torch._dynamo.config.patch(recompile_limit=cuda.RECOMPILATIONS):
        yield counter
    torch._dynamo.reset()


def tensors(
    length: int, heads: int, groups: int, dim: int, v_dim: int, dtype: torch.dtype, view: bool, device=None
) -> tuple[list[Tensor], Tensor]:
    """Return q, k, v and a table of more than ``length`` distances, all with gradients, and the output's gradient.

    With ``view``, q, k, v and the output's gradient have the memory layout of a model, (batch, tokens, heads, dim).
    """
    shapes = [(heads, dim), (groups, dim), (groups, v_dim), (heads, v_dim)]
    rows = [torch.randn(2, length, h, d, device=device).to(dtype).transpose(1, 2) for h, d in shapes]
    q, k, v, grad = rows if view else (x.contiguous() for x in rows)
    return [x.requires_grad_() for x in (q, k, v, torch.randn(heads, length + 3, device=device))], grad


def first_keys(length: int, starts: list[list[int]], device=None) -> Tensor:
    """Return the first token of each token's document, (B, length), given the first tokens of all documents."""
    return torch.tensor([[max(s for s in row if s <= m) for m in range(length)] for row in starts], device=device)


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, window: int | None, scale: float, first_key: Tensor | None = None
) -> list[Tensor]:
    """Return output and log-sum-exp of attention, computed from explicit scores."""
    index = torch.arange(q.shape[2], device=q.device)
    distance = index[:, None] - index
    hidden = (distance < 0) | (distance >= (window or len(index)))
    if first_key is not None:
        hidden = hidden | (index < first_key[:, None, :, None])
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = (q @ k.mT * scale + table[:, distance.clamp(min=0)]).masked_fill(hidden, float("-inf"))
    return [s.softmax(-1) @ v, s.logsumexp(-1)]


@pytest.mark.parametrize(
    ("length", "heads", "groups", "dim", "v_dim", "window", "dtype", "view", "starts"),
    [
        pytest.param(200, 4, 2, 32, 16, 129, torch.float32, True, None, marks=pytest.mark.slow),  # padded to 256
        (65, 2, 1, 20, 20, 1, torch.float32, False, None),
        (130, 2, 2, 16, 16, None, torch.bfloat16, True, None),
        pytest.param(
            600, 2, 1, 16, 16, None, torch.float32, True, [[0, 7, 128, 300], [0, 590]], marks=pytest.mark.slow
        ),
        (200, 1, 1, 16, 16, 90, torch.float32, False, [[0, 1, 2], [0]]),
    ],
)
def test_output_log_sum_exp_and_gradients_are_those_of_fp64(
    length, heads, groups, dim, v_dim, window, dtype, view, starts, monkeypatch
) -> None:
    calls = []  # instead of calls of the kernel for the table's gradient, which `test_cuda` tests
    monkeypatch.setattr(cuda.AddTableGradient, "apply", lambda out, lse, *rest: calls.append(rest) or (out, lse))
    inputs, grad = tensors(length, heads, groups, dim, v_dim, dtype, view)
    exact, grad_lse = [x.detach().double().requires_grad_() for x in inputs], torch.randn(grad.shape[:3])
    first_key = None if starts is None else first_keys(length, starts)
    out, lse = cuda.attend_flex(*inputs, window, 0.3, differentiable_lse=True, first_key=first_key)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    got = torch.autograd.grad((out, lse), inputs[:3], (grad, grad_lse))
    expected = by_definition(*exact, window, 0.3, first_key)
    expected_gradients = torch.autograd.grad(expected, exact[:3], (grad.double(), grad_lse.double()))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for ours, theirs in zip((out, lse, *got), (*expected, *expected_gradients), strict=True):
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()
    assert len(calls) == 1
    assert [(x.shape, x.requires_grad) for x in calls[0][:3]] == [(x.shape, False) for x in inputs[:3]]


@pytest.mark.slow
def test_each_padded_length_and_window_compiles_one_graph(graphs) -> None:
    for length, window in ((40, None), (40, 100), (128, None), (200, None)):
        inputs, _ = tensors(length, 2, 2, 16, 16, torch.float32, False)
        cuda.attend_flex(*(x.detach() for x in inputs), window, 0.25, False)
    assert graphs.frame_count == 3


def test_more_graphs_than_the_limit_raise() -> None:
    torch._dynamo.reset()  # removes the graphs of other tests
    # torch's message depends on earlier compilations with fullgraph
    limit = r"(fullgraph=True|fail_on_recompile_limit_hit)\nuse --model.attention blocks"
    short, medium, long = (tensors(length, 1, 1, 16, 16, torch.float32, False)[0] for length in (128, 256, 384))
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2):
        for inputs in (short, medium):
            cuda.attend_flex(*inputs, None, 0.25, False)
        with pytest.raises(Exception, match=limit):
            cuda.attend_flex(*long, None, 0.25, False)
