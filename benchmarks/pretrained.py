"""Reading 16,384 tokens with the 135M model, imported and through transformers: ``python -m benchmarks.pretrained``.

Needs requirements-pretrained.txt. fp32, SDPA there, losses in pieces in both. ``… 4096 1`` reads 4,096, once each.
"""

import sys
import textwrap
from functools import partial

import torch

from benchmarks.measure import Row, medians, peak_above, publish
from kerple.hf.adapter import HuggingFaceNetwork
from kerple.hf.families import read_family
from kerple.hf.source import locate, read_model, read_model_config
from kerple.hf.weights import fill, transformer
from kerple.model import Transformer

LENGTH = 16384
MEMORY = """
    import torch
    from benchmarks.pretrained import networks
    network = networks()["imported"]
    tokens = torch.randint(49000, (1, {length} + 1))
    def measured():
        with torch.inference_mode():
            return network.losses(tokens)
"""


def networks() -> dict[str, Transformer | HuggingFaceNetwork]:
    """The model read into our own Transformer, and as transformers runs it."""
    source = locate("smollm2-135m")
    model = read_model(source, read_model_config(source))
    read = read_family(model.config, model.state_dict())
    imported = transformer(read.model).eval()
    fill(imported, read)
    return {"imported": imported, "transformers": HuggingFaceNetwork(model)}


@torch.inference_mode()
def main(length: int = LENGTH, repeats: int = 3) -> None:
    torch.manual_seed(0)
    tokens, both = torch.randint(49000, (1, length + 1)), networks()
    for network in both.values():
        network.losses(tokens[:, :1025])  # a whole reading to warm up would take a minute
    ways = {name: partial(network.losses, tokens) for name, network in both.items()}
    times = medians(ways, repeats, warm_up=0)
    detail = ", ".join(f"{name} {t:.1f} s" for name, t in times.items())
    memory = peak_above(textwrap.dedent(MEMORY.format(length=length)))
    rows = [
        Row(
            f"SmolLM2-135M, 1 × {length}: imported / transformers",
            times["imported"] / times["transformers"],
            1.0,
            detail=detail,
        ),
        Row(f"SmolLM2-135M, 1 × {length}: imported, memory above the weights", memory, 1536, "MiB"),
    ]
    publish("pretrained" if length == LENGTH else f"pretrained-{length}", rows, {"seconds": times, "repeats": repeats})


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
