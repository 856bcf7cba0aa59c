"""The measurements themselves: attention, a training step, evaluation. Times are milliseconds."""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

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
    """How large the measurements are: for a GPU, or for a dry run on the CPU."""

    model: str
    tokens: int  # of a step, and of attention
    lengths: tuple[int, ...]
    training: int  # length
    evaluation: int  # length


GPU = Size("162M", 16384, (512, 1024, 2048, 4096, 8192, 16384), 512, 16384)
TOY = Size("demo", 512, (64, 128), 64, 256)
_causal = partial(F.scaled_dot_product_attention, is_causal=True)
LONGEST_MASK = 4096  # 12 heads of T × T scores and their gradient have to fit


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def milliseconds(run: Callable[[], object], at_least: int = 300) -> float:
    """Median of as many runs as take so long, without the time that Python needs to start them."""
    if torch.cuda.is_available():
        from triton.testing import do_bench

        return do_bench(run, warmup=100, rep=at_least, return_mode="median")
    times = []
    for _ in range(3):
        start = time.perf_counter()
        run()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def attention(size: Size, dim: int, length: int) -> dict[str, Any]:
    """Forward and backward in bf16: a learned table, causal attention, a T × T mask; on a GPU, FlexAttention with no
    table, with its own gradient of the table (atomics), and with ALiBi's slopes in place of a table.
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
        "no table": (_causal, inputs),  # on a CPU, where FlexAttention does not train
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
        except Exception as failure:  # one kernel that does not compile or fit is no reason to lose the others
            result[f"{name}, failed"] = str(failure)[:500]
    return result


def _forward_and_backward(call: Callable[..., Tensor], arguments: list[Tensor], grad: Tensor) -> object:
    return torch.autograd.grad(call(*arguments), arguments, grad)


def _flex(like: Tensor, alibi: bool = False) -> Callable[..., Tensor]:
    """FlexAttention with its own gradient of the table that it is given, or with ALiBi's slopes instead."""
    mask = cuda.causal_mask(like.shape[2], None, like.device)
    slopes = 2.0 ** -torch.arange(1, like.shape[1] + 1, device=like.device)

    def add_bias(score: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        return score - slopes[h] * (m - n)

    if alibi:
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        options = cuda.tiles(cuda.shared_memory(like.device), like.shape[3])
        return lambda q, k, v: compiled(q, k, v, add_bias, mask, kernel_options=options)  # type: ignore[arg-type]
    rest = mask, like.shape[3] ** -0.5, False
    return lambda q, k, v, table=None: cuda.compiled_flex()(q, k, v, table, *rest)[0]


def _masked(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """What is done without this package: a mask (H, T, T) that needs a gradient."""
    index = torch.arange(q.shape[2], device=q.device)
    distance = index[:, None] - index  # (T, T)
    mask = table[:, distance.clamp(min=0)].masked_fill(distance < 0, float("-inf")).to(q.dtype)  # (H, T, T)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None].expand(q.shape[0], -1, -1, -1))


def step(size: Size, name: str) -> dict[str, Any]:
    """A compiled training step: time, tokens a second, share of the peak (MFU), memory, the 30 dearest kernels."""
    torch._dynamo.reset()
    gc.collect()  # a compiled network refers to itself, and keeps its memory until then
    batch = size.tokens // size.training
    network = build(size.model, name, size.training, device())
    network.compile()
    run = training_step(network, batch, size.training)
    start = time.monotonic()
    run()
    compilation = time.monotonic() - start
    if device() == "cuda":
        torch.cuda.reset_peak_memory_stats()
    time_ = milliseconds(run, at_least=2000)
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


@torch.no_grad()
def evaluation(size: Size, name: str) -> dict[str, Any]:
    """Reading one long text, in full and with the training length as a window: time and memory."""
    torch._dynamo.reset()
    network = build(size.model, name, size.training, device()).eval()
    tokens = torch.randint(network.embedding.num_embeddings, (1, size.evaluation + 1), device=device())

    def read(protocol: Callable[..., Tensor]) -> None:
        with torch.autocast(device(), torch.bfloat16):
            protocol(network, tokens, size.evaluation)

    if device() == "cuda":
        torch.cuda.reset_peak_memory_stats()
    result: dict[str, Any] = {
        "full": milliseconds(lambda: read(full), at_least=2000),
        "windowed": milliseconds(lambda: read(partial(windowed, visibility=Visibility(size.training))), at_least=2000),
    }
    return result | {"MiB": torch.cuda.max_memory_allocated() / 2**20 if device() == "cuda" else None}
