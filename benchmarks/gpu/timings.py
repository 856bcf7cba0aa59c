"""Timings of attention, of a training step, and of evaluation on one long text. Times are milliseconds."""

import gc
import statistics
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.profiler import ProfilerActivity, profile

from benchmarks.models import build, training_step
from kerple.attention import AttentionSpec, attend, cuda
from kerple.measure.protocols import full, windowed
from kerple.model.cost import CHIPS, flops
from kerple.positions.visibility import Visibility


@dataclass(frozen=True)
class Size:
    """Size of the measurements."""

    model: str  # key of `benchmarks.models.SIZES`
    tokens: int  # tokens of a training step, and batch size × length of attention
    lengths: tuple[int, ...]  # lengths of attention
    document_lengths: tuple[int, ...]  # lengths of segments with several documents
    training: int  # training length
    evaluation: int  # length of the text in `evaluation`


GPU = Size("162M", 16384, (512, 1024, 2048, 4096, 8192, 16384), (512, 2048, 8192), 512, 16384)
TOY = Size("demo", 512, (64, 128), (64, 128, 256), 64, 256)
_causal = partial(F.scaled_dot_product_attention, is_causal=True)
LONGEST_MASK = 4096  # the T × T mask of 12 heads and its gradient must fit into memory


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def milliseconds(run: Callable[[], object], duration: int = 300) -> float:
    """Return the median time of a call: on a GPU, of calls for ``duration`` milliseconds; on a CPU, of three calls."""
    if torch.cuda.is_available():
        from triton.testing import do_bench

        return do_bench(run, warmup=100, rep=duration, return_mode="median")
    return 1000 * statistics.median(timeit.repeat(run, number=1, repeat=3))


def attention(size: Size, dim: int, length: int) -> dict[str, Any]:
    """Return the time of each kernel in bf16, forward and forward with backward.

    The kernels are attention with our table, causal attention and a T × T mask. On a GPU there is also FlexAttention
    without a table, with its own gradient of the table (with atomic operations), and with ALiBi's slopes.
    """
    torch._dynamo.reset()
    heads = 768 // dim
    shape = (size.tokens // length, heads, length, dim)
    q, k, v, grad = (torch.randn(shape, dtype=torch.bfloat16, device=device()) for _ in range(4))
    table = torch.randn(heads, length, device=device())
    inputs = [x.requires_grad_() for x in (q, k, v)]
    with_table = [*inputs, table.requires_grad_()]
    calls: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
        "table": (lambda q, k, v, table: attend(q, k, v, AttentionSpec(table=table)), with_table),
        "causal": (_causal, inputs),
        "no table": (_causal, inputs),  # a placeholder on a CPU, where FlexAttention has no backward pass
    }
    if device() == "cuda":
        calls |= {"no table": (_flex(q), inputs), "own gradient": (_flex(q), with_table)}
        calls["ALiBi"] = (_flex(q, alibi=True), inputs)
    if length <= LONGEST_MASK:
        calls["mask"] = (_masked, with_table)
    result: dict[str, Any] = {}
    for name, (call, arguments) in calls.items():
        try:
            result[f"{name}, forward"] = milliseconds(partial(torch.no_grad()(call), *arguments))
            result[name] = milliseconds(partial(_forward_and_backward, call, arguments, grad))
        except Exception as failure:  # if a kernel does not compile or fit, the others are still measured
            result[f"{name}, failed"] = str(failure)[:500]
    return result


def documents(size: Size) -> dict[str, Any]:
    """Return the time of attention with a table in bf16, forward and with backward, with and without documents.

    Documents have 1 to 1,024 tokens at random. At each of three lengths, `stream` sees all earlier tokens of a segment
    and `documents` sees those of the same document.
    """
    torch._dynamo.reset()
    result: dict[str, Any] = {}
    for length in size.document_lengths:
        batch = size.tokens // length
        shape = (batch, 12, length, 64)
        q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device=device()).requires_grad_() for _ in range(3))
        table = torch.randn(12, length, device=device()).requires_grad_()
        random = torch.Generator().manual_seed(0)
        starts = torch.randint(1, 1025, (batch, length), generator=random).cumsum(-1)  # more than fit
        rows = torch.arange(length)
        first_key = torch.stack([torch.where(rows[:, None] >= of, of, 0).amax(-1) for of in starts]).to(device())
        for name, first in (("stream", None), ("documents", first_key)):
            call = partial(_attend, AttentionSpec(first_key=first))
            inputs = [q, k, v, table]
            result[f"{name}, {length}, forward"] = milliseconds(partial(torch.no_grad()(call), *inputs))
            result[f"{name}, {length}"] = milliseconds(partial(_forward_and_backward, call, inputs, torch.ones_like(q)))
    return result


def _attend(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    return attend(q, k, v, replace(spec, table=table))


def _forward_and_backward(call: Callable[..., Tensor], arguments: list[Tensor], grad: Tensor) -> object:
    return torch.autograd.grad(call(*arguments), arguments, grad)


def _flex(like: Tensor, alibi: bool = False) -> Callable[..., Tensor]:
    """Return FlexAttention with an optional table and its own gradient of it, or with ALiBi's slopes."""
    scale = like.shape[3] ** -0.5
    slopes = 2.0 ** -torch.arange(1, like.shape[1] + 1, device=like.device)

    def add_bias(score: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        return score - slopes[h] * (m - n)

    if alibi:
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        mask, options = cuda.build_mask(like.shape[2], None, like.device), cuda.tiles(like.shape[3], table=False)
        return lambda q, k, v: compiled(q, k, v, add_bias, mask, kernel_options=options)  # type: ignore[arg-type]

    def call(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None = None) -> Tensor:
        line = None if table is None else cuda.aligned_copies(table, like.shape[2])
        return cuda.compiled_flex()(q, k, v, line, None, None, scale, False)[0]

    return call


def _masked(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """Attention with the bias as a mask (H, T, T) that needs a gradient."""
    index = torch.arange(q.shape[2], device=q.device)
    distance = index[:, None] - index  # (T, T)
    mask = table[:, distance.clamp(min=0)].masked_fill(distance < 0, float("-inf")).to(q.dtype)  # (H, T, T)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None].expand(q.shape[0], -1, -1, -1))


def step(size: Size, name: str) -> dict[str, Any]:
    """Return time, tokens per second, MFU, memory and the 30 slowest kernels of a compiled training step."""
    torch._dynamo.reset()
    gc.collect()  # frees the network of an earlier measurement, which refers to itself when it is compiled
    network = build(size.model, name, size.training, device())
    network.compile()
    run = training_step(network, size.tokens // size.training, size.training)
    start = time.monotonic()
    run()
    compilation = time.monotonic() - start
    if device() == "cuda":
        torch.cuda.reset_peak_memory_stats()
    time_ = milliseconds(run, duration=2000)
    speed = 1000 * size.tokens / time_
    gpu = torch.cuda.get_device_name() if device() == "cuda" else ""
    chip = next((chip for chip in CHIPS if chip.name in gpu), None)
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]) as trace:
        run()
    sort = "self_cuda_time_total" if gpu else "self_cpu_time_total"
    return {
        "milliseconds": time_,
        "compilation, seconds": compilation,
        "tokens per second": speed,
        "MFU": speed * flops(network, size.training).training / chip.flops if chip else None,
        "MiB": torch.cuda.max_memory_allocated() / 2**20 if gpu else None,
        "kernels": trace.key_averages().table(sort_by=sort, row_limit=30, max_name_column_width=60),
    }


def step_with_atomics(size: Size, name: str) -> dict[str, Any]:
    """Return the result of `step` if FlexAttention computes the gradient of the table, with atomic additions."""
    with patch.object(cuda, "SEPARATE_GRADIENT", False):
        return step(size, name)


@torch.no_grad()
def evaluation(size: Size, name: str) -> dict[str, Any]:
    """Return time and memory of reading one long text, with full attention and with the training length as window."""
    torch._dynamo.reset()
    network = build(size.model, name, size.training, device()).eval()
    tokens = torch.randint(network.embedding.num_embeddings, (1, size.evaluation + 1), device=device())

    def read(protocol: Callable[..., Tensor]) -> None:
        with torch.autocast(device(), torch.bfloat16):
            protocol(network, tokens, size.evaluation)

    if device() == "cuda":
        torch.cuda.reset_peak_memory_stats()
    return {
        "full": milliseconds(lambda: read(full), duration=2000),
        "windowed": milliseconds(lambda: read(partial(windowed, visibility=Visibility(size.training))), duration=2000),
        "MiB": torch.cuda.max_memory_allocated() / 2**20 if device() == "cuda" else None,
    }
