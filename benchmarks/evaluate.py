"""Reading one segment of 16384 tokens, far past the training length of 512: ``python -m benchmarks.evaluate``."""

import textwrap
from functools import partial

import torch
from torch import Tensor

from benchmarks.measure import Row, medians, peak_above, publish
from benchmarks.models import build
from kerple.evaluation.protocols import full, windowed
from kerple.model import Transformer

LENGTH = 16384
MEMORY = f"""
    import torch
    from benchmarks.evaluate import score
    from benchmarks.models import build
    network = build("162M", "KerpleLog", 512).eval()
    tokens = torch.randint(50000, (1, {LENGTH} + 1))
    def measured():
        return score(network, tokens)
"""


@torch.no_grad()
def score(network: Transformer, tokens: Tensor, window: int | None = None) -> Tensor:
    """Losses of one segment, under bf16 autocast."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        if window is not None:
            return windowed(network, tokens, LENGTH, window=window)
        return full(network, tokens, LENGTH)


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    networks = {name: build("demo", name, 512, device).eval() for name in ("KerpleLog", "NoPE")}
    tokens = torch.randint(2048, (1, LENGTH + 1), device=device)
    ways = {name: partial(score, network, tokens) for name, network in networks.items()}
    ways["windowed 512"] = partial(score, networks["KerpleLog"], tokens, 512)
    times = medians(ways, repeats=7)
    detail = ", ".join(f"{name} {t:.2f} s" for name, t in times.items())
    rows = [
        Row("demo model, 1 × 16384: KerpleLog / NoPE", times["KerpleLog"] / times["NoPE"], 1.1, detail=detail),
        Row("demo model, 1 × 16384: windowed 512 / full", times["windowed 512"] / times["KerpleLog"], 1.0),
    ]
    if device == "cpu":
        rows.append(Row("162M, 1 × 16384: memory above the model", peak_above(textwrap.dedent(MEMORY)), 8192, "MiB"))
    else:
        large = build("162M", "KerpleLog", 512, device).eval()
        torch.cuda.reset_peak_memory_stats()
        score(large, tokens)
        memory = torch.cuda.max_memory_allocated() / 2**20
        rows.append(Row("162M, 1 × 16384: memory, the model included", memory, 8192, "MiB"))
    publish("evaluate", rows, {"seconds": times})


if __name__ == "__main__":
    main()
