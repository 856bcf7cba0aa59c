"""Comparison of this project's training steps with hand-written blocks and other libraries.

Run it with ``python -m benchmarks.peers``. Both sides have the same network: 4 layers of width 128 with 4 heads and
2,048 token ids, 1,048,576 weights in matrix products, fp32, AdamW. Each side is a process with one thread. The two
processes take turns, so that a slow moment of the machine affects both. Processor time is measured, because other
programs lengthen it far less than elapsed time. The reported ratio is our time divided by their time: the median over
the turns, with quartiles.

A column such as 8x128 is a training step with batch size 8 and length 128. A column such as read4096 is the
computation of the losses of one text of 4,096 tokens, without gradients. Libraries that are not installed are skipped.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import RECORDS, in_processes, ratio, record
from benchmarks.models import SIZES, build

WIDTH, HEADS, LAYERS, VOCABULARY = SIZES["demo"]
COLUMNS = ("8x128", "16x64", "8x512", "2x2048", "read4096")


class PlainBlock(nn.Module):
    """Pre-norm block that uses only torch."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Apply the block to x (B, T, D). The bias (H, T, T) is -inf for later keys; None for causal attention."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1))  # (B, T, 3, H, δ)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, δ) each
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=bias is None)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class PlainTransformer(nn.Module):
    """Network of `PlainBlock` without positions, or with the bias of KERPLE-log as a tensor (H, T, T)."""

    def __init__(self, kerple: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([PlainBlock() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        # parameters r1 and r2 of each head
        self.kerple = nn.Parameter(torch.ones(2, HEADS, 1, 1)) if kerple else None

    def bias(self, length: int) -> Tensor | None:
        """Return the bias of KERPLE-log (H, T, T), or None without positions."""
        if self.kerple is None:
            return None
        r1, r2 = self.kerple
        position = torch.arange(length)
        distance = position[:, None] - position  # (T, T)
        return (-r1 * torch.log1p(r2 * distance.clamp(min=0))).masked_fill(distance < 0, float("-inf"))  # (H, T, T)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, T, V) of tokens (B, T)."""
        x, bias = self.embedding(tokens), self.bias(tokens.shape[1])
        for block in self.blocks:
            x = block(x, bias)
        return self.head(self.norm(x))


def x_transformers(length: int, **options: Any) -> nn.Module:
    """Return a network of x-transformers with these options of its layers."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=WIDTH, depth=LAYERS, heads=HEADS, attn_dim_head=WIDTH // HEADS, **options)
    return TransformerWrapper(
        num_tokens=VOCABULARY, max_seq_len=length, use_abs_pos_emb=False, tie_embedding=False, attn_layers=layers
    )


def gpt_neox(length: int) -> nn.Module:
    """Return a GPT-NeoX of transformers that returns logits."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    class Logits(GPTNeoXForCausalLM):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens, use_cache=False).logits

    config = GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        max_position_embeddings=length,
    )
    config._attn_implementation = "sdpa"
    return Logits(config)


class Row(NamedTuple):
    """Row of the table of ratios."""

    strategy: str  # class name of our strategy
    peer: str  # name of the other implementation in the table
    package: str  # package that the other implementation needs
    build: Callable[[int], nn.Module]  # function from the length to the other implementation
    options: dict[str, Any] = {}  # noqa: RUF012  # options of our strategy; the default is never changed


LIBRARY = "x_transformers"
projected = partial(x_transformers, attn_use_rel_proj_pos_bias=True)  # 16 curves of 1,024 distances, as in Inkling
ROWS = [
    Row("KerpleLog", "plain block, (H, T, T) bias in SDPA", "torch", lambda _: PlainTransformer(kerple=True)),
    Row("ALiBi", "x-transformers, flash", LIBRARY, partial(x_transformers, alibi_pos_bias=True, attn_flash=True)),
    Row("RoPE", "GPT-NeoX of transformers, SDPA", "transformers", gpt_neox),
    Row("NoPE", "plain block, is_causal", "torch", lambda _: PlainTransformer(kerple=False)),
    Row("T5", "x-transformers", LIBRARY, partial(x_transformers, rel_pos_bias=True)),
    Row("LearnedRelativeBias", "x-transformers, projected", LIBRARY, projected, {"rank": 16, "extent": 1024}),
]


def contestant(strategy: str, side: str, column: str) -> Callable[[], object]:
    """Return a function that makes a training step, or computes losses, with ``ours`` or ``theirs`` of a row."""
    row = next(row for row in ROWS if row.strategy == strategy)
    reads = column.startswith("read")
    batch, length = (1, int(column[4:])) if reads else map(int, column.split("x"))
    torch.manual_seed(0)
    network: Any = build("demo", row.strategy, length, **row.options) if side == "ours" else row.build(length)
    network.train(not reads)
    tokens = torch.randint(VOCABULARY, (batch, length + 1))

    def loss() -> Tensor:
        if side == "ours":
            return network.losses(tokens).mean()
        return F.cross_entropy(network(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    if reads:
        return torch.inference_mode()(loss)
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        loss().backward()
        optimiser.step()
        if side == "ours":
            network.constrain_()
        optimiser.zero_grad()

    return step


def measure(strategy: str, column: str, repeats: int) -> dict[str, Any]:
    """Return a cell of the table: median and quartiles of the ratios, and the median seconds of both sides."""
    sides = {side: partial(contestant, strategy, side, column) for side in ("ours", "theirs")}
    seconds = in_processes(sides, repeats)
    middle, *quartiles = ratio(seconds["ours"], seconds["theirs"])
    medians = [statistics.median(side) for side in seconds.values()]
    return {"ratio": middle, "quartiles": quartiles, "seconds": medians, "turns": repeats}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="*", default=(known := [row.strategy for row in ROWS]), choices=known)
    parser.add_argument("--columns", nargs="*", default=COLUMNS, help="columns such as 8x128 and read4096")
    parser.add_argument("--repeats", type=int, default=25, help="number of turns of each cell")
    parser.add_argument("--name", help="write the record benchmarks/records/peers-NAME.json")
    options = parser.parse_args()
    cells: dict[str, dict[str, dict[str, Any]]] = {}
    print(f"| ours / theirs | {' | '.join(options.columns)} |\n|---|{'---|' * len(options.columns)}")
    for row in ROWS:
        if row.strategy not in options.strategies:
            continue
        name = f"{row.strategy} / {row.peer}"
        if find_spec(row.package) is None:
            print(f"| {name} | {row.package} is not installed |")
            continue
        print(f"| {name} |", end="", flush=True)
        for column in options.columns:
            cell = cells.setdefault(name, {})[column] = measure(row.strategy, column, options.repeats)
            low, high = cell["quartiles"]
            print(f" {cell['ratio']:.2f} [{low:.2f}, {high:.2f}] |", end="", flush=True)
        print()
    if options.name:
        (RECORDS / f"peers-{options.name}.json").write_text(json.dumps(record() | {"cells": cells}, indent=1) + "\n")


if __name__ == "__main__":
    main()
