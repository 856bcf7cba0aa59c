"""The measurements themselves: attention, a training step, evaluation; each returns rows and details for its record."""

import gzip
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.attention import both, explicit, plain
from benchmarks.measure import Row, medians
from benchmarks.models import beside_nope, build, compiled_step
from kerple.attention import Modifiers, attend
from kerple.evaluation.protocols import full, windowed
from kerple.model.cost import CHIPS, flops


@dataclass(frozen=True)
class Scale:
    """How large the pieces are: for a GPU, or for a dry run on the CPU."""

    model: str
    tokens: int  # of a step, and of attention
    lengths: tuple[int, ...]
    training: int  # length
    evaluation: int  # length
    repeats: int


GPU = Scale("162M", 16384, (512, 1024, 2048, 4096, 8192, 16384), 512, 16384, 15)
TOY = Scale("demo", 512, (64, 128), 64, 256, 2)
EXPLICIT = 4096  # longest with scores written down: 12 heads of T × T and their gradient
NAMES = ("KerpleLog", "NoPE", "RoPE", "ALiBi")


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def chip() -> Any:
    """The data sheet of this GPU, or None."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((c for c in CHIPS if c.name in name), None)


def attention(scale: Scale, out: Path) -> tuple[list[Row], dict[str, Any]]:
    """Forward and backward in bf16: a learned table, causal attention, FlexAttention without a table, a T × T mask."""
    seconds: dict[str, dict[str, float]] = {}
    for dim in (64, 128):
        for length in scale.lengths:
            heads = 768 // dim
            shape = (scale.tokens // length, heads, length, dim)
            q, k, v, grad = (torch.randn(shape, dtype=torch.bfloat16, device=device()) for _ in range(4))
            inputs = [x.requires_grad_() for x in (q, k, v)]
            table = torch.randn(heads, length, device=device(), requires_grad=True)
            ways: dict[str, Callable[[], object]] = {
                "table": both(_with_table, grad, *inputs, table),
                "causal": both(plain, grad, *inputs),
                "no table": both(_without_table, grad, *inputs),
            }
            if length <= EXPLICIT:
                ways["explicit mask"] = both(explicit, grad, *inputs, table)
            torch._dynamo.reset()
            seconds[f"δ {dim}, T {length}"] = medians(ways, scale.repeats)
    wanted = f"δ 64, T {2048 if 2048 in scale.lengths else scale.lengths[-1]}"
    at = seconds[wanted]
    limit = 1.8 if chip() is not None and chip().name == "A100" else 2.5
    rows = [
        Row(f"table / FlexAttention without a table, {wanted}", at["table"] / at["no table"], 1.35),
        Row(f"table / causal attention, {wanted}", at["table"] / at["causal"], limit),
        Row(f"explicit mask / table, {wanted}", at["explicit mask"] / at["table"], 5, at_least=True),
    ]
    return rows, {"medians": seconds}


def _with_table(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    return attend(q, k, v, Modifiers(table=table))


def _without_table(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)  # FlexAttention does not train on a CPU
    from kerple.attention.cuda import attend_flex

    return attend_flex(q, k, v, None, None)[0]


def step(scale: Scale, out: Path) -> tuple[list[Row], dict[str, Any]]:
    """A compiled training step at the paper's size: tokens a second, share of the peak (MFU), memory, one profile."""
    batch = scale.tokens // scale.training
    found = {name: _step_with(name, scale, batch, out) for name in NAMES}
    ratio = beside_nope(scale.model, batch, scale.training, device(), scale.repeats)
    size = f"{batch} × {scale.training}"
    rows = [
        Row(f"{scale.model}, a step of {size}: KerpleLog / NoPE", ratio, 1.03),
        Row(f"{scale.model}, a step of {size}: MFU", found["KerpleLog"]["MFU"], 0.4, unit="", at_least=True),
    ]
    return rows, {"strategies": found}


def _step_with(name: str, scale: Scale, batch: int, out: Path) -> dict[str, Any]:
    """Speed and memory of a strategy's step; its network is gone when this returns."""
    network, run = compiled_step(scale.model, name, batch, scale.training, device())
    if device() == "cuda":
        torch.cuda.reset_peak_memory_stats()
    speed = batch * scale.training / medians({name: run}, scale.repeats)[name]
    used = speed * flops(network, scale.training).training
    if name == "KerpleLog":
        _profile(run, out)
    return {
        "tokens per second": speed,
        "MFU": used / chip().flops if chip() else None,
        "peak bytes": torch.cuda.max_memory_allocated() if device() == "cuda" else None,
    }


def _profile(run: Callable[[], object], out: Path) -> None:
    """One step's trace, for chrome://tracing; small enough to travel."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device() == "cuda" else [])]
    with profile(activities=kinds) as trace:
        run()
    plain_file = out / "step-trace.json"
    trace.export_chrome_trace(str(plain_file))
    with plain_file.open("rb") as source, gzip.open(out / "step-trace.json.gz", "wb") as target:
        shutil.copyfileobj(source, target)
    plain_file.unlink()


@torch.no_grad()
def evaluation(scale: Scale, out: Path) -> tuple[list[Row], dict[str, Any]]:
    """Reading one long segment, every strategy of the step's: seconds and memory."""
    found, rows = {}, []
    for name in NAMES:
        torch._dynamo.reset()
        network = build(scale.model, name, scale.training, device()).eval()
        tokens = torch.randint(network.embedding.num_embeddings, (1, scale.evaluation + 1), device=device())

        def read(protocol: Callable[..., Tensor], network: Any = network, tokens: Tensor = tokens) -> None:
            with torch.autocast(device(), torch.bfloat16):
                protocol(network, tokens, scale.evaluation)

        ways = {"full": partial(read, full), "windowed": partial(read, partial(windowed, window=scale.training))}
        if device() == "cuda":
            torch.cuda.reset_peak_memory_stats()
        found[name] = medians(ways, 3)
        memory = torch.cuda.max_memory_allocated() / 2**20 if device() == "cuda" else None
        rows.append(Row(f"{scale.model}, 1 × {scale.evaluation}, {name}: memory", memory, 8192, unit="MiB"))
    return rows, {"medians": found}


def write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
