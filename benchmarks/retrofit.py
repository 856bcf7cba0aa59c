"""Processor time of a model with KERPLE-log by `kerple.hf.retrofit`, beside RoPE and beside a bias as a T × T mask.

``python -m benchmarks.retrofit`` prints ratios for the shape of SmolLM2-135M. Each model runs in a process with one
thread, and the processes take turns. The masks of 1 × 2,048 tokens take 14 GB, and the whole run 20 GB. Smaller shapes,
such as ``--layers 4 --vocabulary 4096``, take less time and memory.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import in_processes, ratio
from kerple.attention import AttentionSpec, attend
from kerple.positions import KerpleLog, Shape

SIZES: dict[str, Any] = {"hidden_size": 576, "intermediate_size": 1536}
SIZES |= {"num_attention_heads": 9, "num_key_value_heads": 3}
WAYS = ("retrofit", "rope", "mask")
TRAININGS = ((4, 512), (1, 2048))


def mask_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any) -> Any:
    """Attention with the bias of KERPLE-log as a mask (H, T, T) of torch's `scaled_dot_product_attention`."""
    length = key.shape[2]
    rows = torch.arange(length)
    distance = (rows[:, None] - rows)[-query.shape[2] :].float()
    bias = module.position.bias(distance.clamp(min=0).flatten()).unflatten(1, distance.shape)
    bias = bias.masked_fill(distance < 0, -torch.inf)
    out = F.scaled_dot_product_attention(query, key, value, bias, scale=options["scaling"], enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def build(way: str, layers: int, vocabulary: int) -> Any:
    """Return a model with random weights: with KERPLE-log by `retrofit`, with RoPE, or with a T × T mask."""
    from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig

    from kerple.hf import retrofit

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=vocabulary, num_hidden_layers=layers, max_position_embeddings=2048, **SIZES)
    model = AutoModelForCausalLM.from_config(config)
    if way == "retrofit":
        retrofit(model, KerpleLog)
    if way == "mask":  # RoPE stays, which costs little beside attention
        AttentionInterface.register("mask", mask_attention)
        model.config._attn_implementation = "mask"
        position = KerpleLog(Shape(576, 9, 2048))
        for layer in model.model.layers:
            layer.self_attn.position = position
    return model


def training_step(way: str, layers: int, vocabulary: int, batch: int, length: int) -> Callable[[], None]:
    """Return a function that runs a forward and a backward pass."""
    model = build(way, layers, vocabulary).train()
    tokens = torch.randint(vocabulary, (batch, length))

    def step() -> None:
        model.zero_grad()
        model(tokens, labels=tokens, use_cache=False).loss.backward()

    return step


def generation(way: str, layers: int, vocabulary: int) -> Callable[[], None]:
    """Return a function that generates 256 tokens after 64 tokens with a cache."""
    model = build(way, layers, vocabulary).eval()
    tokens = torch.randint(vocabulary, (1, 64))
    options = {"attention_mask": torch.ones_like(tokens), "do_sample": False, "pad_token_id": 0}
    return partial(model.generate, tokens, max_new_tokens=256, min_new_tokens=256, **options)


def block(way: str, length: int) -> Callable[[], None]:
    """Return a function that runs forward and backward of attention in a block with 8 heads of 64 dimensions."""
    position = KerpleLog(Shape(512, 8, length))
    q, k, v = (torch.randn(1, 8, length, 64, requires_grad=True) for _ in range(3))
    module = nn.Module()
    module.position = position

    def run() -> None:
        if way == "attend":
            out = attend(q, k, v, AttentionSpec(table=position.bias(torch.arange(float(length)))))
        else:
            out = mask_attention(module, q, k, v, None, scaling=64**-0.5)[0]
        out.sum().backward()

    return run


def compare(name: str, builders: dict[str, Any], repeats: int) -> None:
    """Print the median and the quartiles of the ratio of the first function's time to those of the others."""
    seconds = in_processes(builders, repeats)
    first, *others = builders
    for other in others:
        middle, low, high = ratio(seconds[first], seconds[other])
        print(f"{name}: {first} / {other} {middle:.3f} ({low:.3f} to {high:.3f})", flush=True)


def main() -> None:
    """Print all ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    shape = options.layers, options.vocabulary
    for length in (1024, 4096):
        compare(
            f"block, {length} tokens", {way: partial(block, way, length) for way in ("attend", "mask")}, options.repeats
        )
    for size in TRAININGS:
        builders = {way: partial(training_step, way, *shape, *size) for way in WAYS}
        compare(f"training step, {size[0]} × {size[1]}", builders, options.repeats)
    builders = {way: partial(generation, way, *shape) for way in ("retrofit", "rope")}
    compare("256 tokens with a cache", builders, options.repeats)


if __name__ == "__main__":
    main()
