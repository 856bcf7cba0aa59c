"""Attention with a learned table of biases by distance beside attention without: ``python -m benchmarks.attention``.

B 4, H 8, δ 64, forward + backward unless said otherwise. Every ratio is of medians taken in turns in this run.
"""

import textwrap
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import Row, medians, peak_above, publish
from kerple.attention import Modifiers, attend

BATCH, HEADS, DIM = 4, 8, 64
TARGETS = {
    (torch.float32, 512): 0.9,
    (torch.float32, 2048): 1.1,
    (torch.bfloat16, 64): 0.5,
    (torch.bfloat16, 128): 0.5,
    (torch.bfloat16, 512): 0.8,
    (torch.bfloat16, 2048): 1.1,
}
MEMORY = """
    import torch
    from kerple.attention import Modifiers, attend
    def tensors(length):
        q, k, v, grad = (torch.randn(4, 8, length, 64, requires_grad=True) for _ in range(4))
        return q, k, v, grad.detach(), torch.randn(8, length, requires_grad=True)
    q, k, v, grad, table = tensors(256)
    torch.autograd.grad(attend(q, k, v, Modifiers(table=table)), (q, k, v, table), grad)  # libraries and their caches
    q, k, v, grad, table = tensors(2048)
    results = [torch.ones_like(q) for _ in range(4)]  # what the output and three gradients will take
    def measured():
        results.clear()
        return torch.autograd.grad(attend(q, k, v, Modifiers(table=table)), (q, k, v, table), grad)
"""


def tensors(dtype: torch.dtype, length: int, device: str, batch: int = BATCH) -> tuple[Tensor, ...]:
    q, k, v, grad = (torch.randn(batch, HEADS, length, DIM, dtype=dtype, device=device) for _ in range(4))
    table = torch.randn(HEADS, length, device=device)
    return *(x.requires_grad_() for x in (q, k, v)), grad, table.requires_grad_()


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def biased(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    return attend(q, k, v, Modifiers(table=table))


def both(way: Callable[..., Tensor], grad: Tensor, *inputs: Tensor) -> Callable[[], object]:
    """Forward and backward of ``way``, to be called."""
    return lambda: torch.autograd.grad(way(*inputs), inputs, grad)


def explicit(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """What is done without this package: a T × T mask that needs a gradient."""
    index = torch.arange(q.shape[2], device=q.device)
    distance = index[:, None] - index
    mask = table[:, distance.clamp(min=0)].masked_fill(distance < 0, float("-inf")).to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None].expand(q.shape[0], -1, -1, -1))


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[Row] = []
    details: dict[str, dict[str, float]] = {}

    def milliseconds(name: str, times: dict[str, float]) -> str:
        details[name] = {way: 1e3 * t for way, t in times.items()}
        return ", ".join(f"{way} {1e3 * t:.1f} ms" for way, t in times.items())

    for (dtype, length), target in TARGETS.items():
        q, k, v, grad, table = tensors(dtype, length, device)
        name = f"table / is_causal, {str(dtype)[6:]}, T {length}"
        times = medians(
            {
                "table": both(biased, grad, q, k, v, table),
                "is_causal": both(plain, grad, q, k, v),
            },
            repeats=9 if length > 512 else 25,
        )
        rows.append(Row(name, times["table"] / times["is_causal"], target, detail=milliseconds(name, times)))

    q, k, v, grad, table = tensors(torch.float32, 2048, device)
    name = "mask with a gradient / table, float32, T 2048"
    times = medians(
        {
            "mask": both(explicit, grad, q, k, v, table),
            "table": both(biased, grad, q, k, v, table),
        },
        repeats=7,
    )
    rows.append(Row(name, times["mask"] / times["table"], 5, at_least=True, detail=milliseconds(name, times)))
    del q, k, v, grad, table

    if device == "cpu":
        memory = peak_above(textwrap.dedent(MEMORY))
        rows.append(Row("memory above inputs, outputs, gradients, float32, T 2048", memory, 64, "MiB"))

    with torch.no_grad():
        q, k, v, _, table = tensors(torch.bfloat16, 16384, device, batch=1)
        name = "forward, table / is_causal, bfloat16, T 16384, B 1"
        times = medians(
            {
                "table": partial(attend, q, k, v, Modifiers(table=table)),
                "is_causal": partial(plain, q, k, v),
                "window 512": partial(attend, q, k, v, Modifiers(table=table, window=512)),
            },
            repeats=7,
        )
        rows.append(Row(name, times["table"] / times["is_causal"], 1.1, detail=milliseconds(name, times)))
        rows.append(
            Row("forward, window 512 / without, bfloat16, T 16384, B 1", times["window 512"] / times["table"], 0.12)
        )

    publish("attention", rows, {"milliseconds": details})


if __name__ == "__main__":
    main()
