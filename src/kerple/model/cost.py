"""Cost of a network, computed without data: parameters, FLOPs and memory."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from kerple.model.block import Block
from kerple.model.loss import ChunkSizes, target_losses
from kerple.model.transformer import Transformer, run_block


@dataclass(frozen=True)
class Chip:
    """Specifications of a device from its data sheet.

    Args:
        name: Part of the name from `torch.cuda.get_device_name`.
        flops: Dense bf16 FLOPs per second.
        memory: Memory in bytes.
        link: Bytes per second from a device to the other devices of its machine.
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
    """Floating-point operations per token of a forward pass. A product of a × b and b × c matrices counts as 2·a·b·c.

    Args:
        products: Operations of the linear layers, including the head.
        attention: Operations of q·k and p·v for half of the T × T pairs, because attention is causal, or for the
            fraction of these pairs that are inside one document.
    """

    products: int
    attention: int

    @property
    def training(self) -> int:
        """Operations of forward and backward pass. The backward pass counts as two forward passes."""
        return 3 * (self.products + self.attention)


def flops(network: Transformer, length: int, visible: float = 1.0) -> Flops:
    """Return the FLOPs per token for segments of ``length`` tokens, without those of the positional strategy.

    Args:
        network: The network.
        length: Number of tokens in a segment, T.
        visible: Fraction of the pairs of a query and an earlier key that are inside one document.
    """
    excluded = {m for p in network.positions for m in p.modules()}
    weights = sum(m.weight.numel() for m in network.modules() if isinstance(m, nn.Linear) and m not in excluded)
    causal = len(network.blocks) * 2 * network.shape.heads * network.shape.head_dim * length
    return Flops(2 * weights, round(causal * visible))


def count_parameters(network: Transformer) -> dict[str, int]:
    """Return the number of parameters of each part of the network, such as ``embedding``, ``blocks`` and ``head``.

    The strategies are the part ``positions``. A matrix that embedding and head share is counted as ``embedding``.
    """
    parts: Counter[str] = Counter()
    for name, p in network.named_parameters():  # each parameter once, under its first name
        part = name.partition(".")[0]
        parts["norms" if part == "norm" else part] += p.numel()
    return parts


def memory(
    network: Transformer, batch: int, length: int, precision: torch.dtype | None, moments: float = 2.0
) -> dict[str, int]:
    """Compute the memory of a training step on a GPU.

    The forward pass runs on fake tensors, which have no data. The tensors that autograd saves in it are counted.

    Args:
        network: Network on the meta device. It cannot be used afterwards.
        batch: Number of segments in a micro-batch.
        length: Number of tokens in a segment.
        precision: Dtype of autocast; None for no autocast.
        moments: Number of moments per parameter in the optimiser; 2 for AdamW.

    Returns:
        Bytes of ``weights``, ``gradients``, moments of the ``optimiser``, ``activations``, ``logits`` and ``total``.
        ``activations`` are the tensors saved by embedding, blocks and last norm of a network that is not compiled,
        including copies of weights in a lower precision. With activation checkpointing, they are the inputs of all
        blocks, and the tensors saved by the largest block. ``logits`` are the tensors saved by head and loss. Processes
        that exchange gradients in buckets need twice the bytes of ``gradients``.
    """
    tied = network.head.weight is network.embedding.weight
    with FakeTensorMode(allow_non_fake_inputs=True):
        network.to_empty(device="cpu")  # replaces parameters by fake tensors, which have a device and no data
        if tied:
            network.head.weight = network.embedding.weight
        weights = sum(p.numel() * p.element_size() for p in network.parameters())
        excluded = {p.untyped_storage()._cdata for p in network.parameters()}
        tokens = torch.zeros(batch, length, dtype=torch.int64)
        with torch.autocast("cpu", precision, enabled=precision is not None):
            with stored_for_backward(excluded) as activations:
                features = network.features(tokens).flatten(0, 1)
            block = _largest_block(network, tokens, excluded) if network.checkpoint_activations else 0
            with stored_for_backward(excluded) as logits:
                sizes = ChunkSizes.of_device(torch.device("cuda"))
                target_losses(network.head, features, tokens.flatten(), sizes=sizes, cap=network.logit_cap)
    parts: dict[str, int] = {"weights": weights, "gradients": weights, "optimiser": int(moments * weights)}
    parts["activations"] = sum(s.nbytes() for s in activations) + block
    parts["logits"] = sum(s.nbytes() for s in logits)
    return parts | {"total": sum(parts.values())}


def _largest_block(network: Transformer, tokens: Tensor, excluded: set[int]) -> int:
    """Return the largest number of bytes that autograd saves in a block, without the input of the block."""
    sizes = []

    def run(block: Block, x: Tensor, *arguments: Any) -> Tensor:
        with stored_for_backward(excluded | {x.untyped_storage()._cdata}) as saved:
            out = run_block(block, x, *arguments)
        sizes.append(sum(s.nbytes() for s in saved))
        return out

    network.checkpoint_activations = False
    network.run_block = cast(Any, run)  # the type of the attribute is that of one function
    network.features(tokens)
    return max(sizes)


@contextmanager
def stored_for_backward(excluded: set[int]) -> Iterator[list[Any]]:
    """Context manager that yields the list of the storages that autograd saves in the context.

    The list keeps the storages alive, so that no other storage gets their addresses.

    Args:
        excluded: Addresses of storages that are not added. Addresses of added storages are added to this set.
    """
    storages: list[Any] = []

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in excluded:
            excluded.add(storage._cdata)
            storages.append(storage)
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        yield storages
