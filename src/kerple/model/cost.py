"""What a network costs, counted before anything runs: parameters, FLOPs and memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from kerple.model.head import Pieces, target_losses
from kerple.model.transformer import Transformer
from kerple.positions import Position


@dataclass(frozen=True)
class Chip:
    """A device as its data sheet describes it.

    Args:
        name: As `torch.cuda.get_device_name` contains it.
        flops: Dense bf16 FLOP/s.
        memory: Bytes.
        link: Bytes a second that a device sends to others of its machine.
    """

    name: str
    flops: float
    memory: int
    link: float


CHIPS = (
    Chip("A100", 312e12, 80 * 10**9, 300e9),
    Chip("H100", 989e12, 80 * 10**9, 450e9),
    Chip("H200", 989e12, 141 * 10**9, 450e9),
)


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of a forward pass, a token; a product of matrices of a × b × c is 2abc.

    Args:
        products: With the weights of linear layers, the head's included, the embedding's not.
        attention: q·k and p·v, for the half of the T × T pairs that a causal mask leaves.
    """

    products: int
    attention: int

    @property
    def training(self) -> int:
        """Forward and backward: gradients of inputs and of weights are a forward pass each."""
        return 3 * (self.products + self.attention)


def flops(network: Transformer, length: int) -> Flops:
    """FLOPs a token of segments of ``length``. What a strategy computes of its own is not counted."""
    weights = sum(m.weight.numel() for m in network.modules() if isinstance(m, nn.Linear))
    return Flops(2 * weights, len(network.blocks) * 2 * network.shape.dim * length)


def parameters(network: Transformer) -> dict[str, int]:
    """Number of parameters by part; a matrix that is both embedding and head counts as the embedding's."""
    parts: dict[str, int] = {}
    seen: set[nn.Parameter] = set()
    strategies = {p for m in network.modules() if isinstance(m, Position) for p in m.parameters()}
    for name, p in network.named_parameters():
        if p in seen:
            continue
        seen.add(p)
        first = name.partition(".")[0]
        part = "positions" if p in strategies else "norms" if first == "norm" else first
        parts[part] = parts.get(part, 0) + p.numel()
    return parts


@dataclass(frozen=True)
class Memory:
    """Bytes on each device while one micro-batch is trained on.

    Args:
        weights: Parameters.
        gradients: Of them; twice where processes exchange them in buckets.
        optimiser: Its moments.
        activations: What the blocks keep for the backward pass, the weights' copies in a lower precision included, as
            a network that is not compiled keeps it.
        logits: What the head and the loss keep.
    """

    weights: int
    gradients: int
    optimiser: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimiser + self.activations + self.logits


def memory(
    network: Transformer, batch: int, length: int, precision: torch.dtype | None, moments: float = 2.0
) -> Memory:
    """Count on tensors without data, with torch's own record of what autograd keeps.

    Args:
        network: On the meta device; its parameters are others afterwards.
        batch: Segments in a micro-batch.
        length: Tokens in a segment.
        precision: Of autocast; None for none.
        moments: Numbers that the optimiser keeps for each parameter: AdamW 2.
    """
    tied = network.head.weight is network.embedding.weight
    with FakeTensorMode(allow_non_fake_inputs=True):
        network.to_empty(device="cpu")  # of a pretended CPU
        if tied:
            network.head.weight = network.embedding.weight
        own = sum(p.numel() * p.element_size() for p in network.parameters())
        known = {p.untyped_storage()._cdata for p in network.parameters()}
        tokens = torch.zeros(batch, length, dtype=torch.int64)
        with torch.autocast("cpu", precision, enabled=precision is not None):
            with kept(known) as activations:
                features = network.features(tokens).flatten(0, 1)
            with kept(known) as logits:
                target_losses(network.head, features, tokens.flatten(), pieces=Pieces.choose(torch.device("cuda")))
    return Memory(own, own, int(moments * own), sum(activations.values()), sum(logits.values()))


@contextmanager
def kept(known: set[int]) -> Iterator[dict[int, int]]:
    """Bytes of every storage that autograd keeps meanwhile, by storage; ``known`` ones are left out, new ones added."""
    found: dict[int, int] = {}
    alive: list[Any] = []  # or a later storage takes the place of an earlier one

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in known:
            known.add(storage._cdata)
            found[storage._cdata] = storage.nbytes()
            alive.append(storage)
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        yield found
