"""Selection of the implementation of attention. Each implementation is logged once, with the reason."""

import logging
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch

from kerple.base.errors import UserError

AttentionOption = Literal["auto", "fused", "blocks", "reference"]
"""Values of the option `model.attention`; see `kerple.model.architecture.Architecture`."""

FEW_KEYS = 16  # up to this number of keys attention is computed in fp32, because bf16 would save no time
HEAD_DIMS = (16, 128)  # FlexAttention raises below 16; above 128 its kernels exceed the chip's shared memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttentionBackend:
    """Implementation of attention, and the reason for its selection.

    - ``sdpa``: torch's fused attention without a table.
    - ``tiles``: torch's fused kernel with the table as its mask, and a backward pass in tiles; for the CPU (`cpu`).
    - ``flex``: FlexAttention, and a kernel for the table's gradient; for GPUs (`cuda`).
    - ``blocks``: explicit scores for one block of queries at a time, on any device (`blocks`).
    - ``reference``: explicit scores of T × T.
    """

    name: Literal["sdpa", "tiles", "flex", "blocks", "reference"]
    reason: str


backends_used: dict[AttentionBackend, None] = {}
"""Backends in the order of their first use. After ``clear()`` each is logged again."""


# keyword arguments, because torch.compile cannot pass a dataclass to a function with a constant result (see below)
def select(
    option: AttentionOption,
    *,
    device: torch.device,
    dtype: torch.dtype,
    dims: tuple[int, int],
    queries: Literal["all", "one", "last"],
    few_keys: bool,
    table: bool,
    window: bool,
    explicit: bool,
) -> str:
    """Return the name of the backend of a call, and log the backend at its first use.

    In a compiled network this runs during tracing.

    Args:
        option: ``auto`` for the fastest possible backend. ``fused`` is an error if training or evaluation would use
            blocks. ``blocks`` and ``reference`` force these.
        device: Device of the tensors.
        dtype: Dtype of q, k and v after autocast.
        dims: Dimensions δ of q and k, and δ' of v.
        queries: Whether the queries are all rows, one row, or some of the last rows.
        few_keys: Whether there are at most `FEW_KEYS` keys.
        table: Whether an attention bias by distance is added.
        window: Whether a window hides some keys.
        explicit: Whether the strategy needs explicit scores: weights by distance, or its own scores or output.

    Raises:
        UserError: If the option is ``fused``, and no fused implementation is possible.
    """
    # torch's causal mask takes the queries for the first rows, not the last
    plain = not table and not window and queries in ("all", "one")
    if option in ("blocks", "reference"):
        backend = AttentionBackend(option, "model.attention selects it")
    elif explicit:
        backend = AttentionBackend("blocks", "no fused kernel supports this strategy's weights, scores or output")
    elif plain:
        backend = AttentionBackend("sdpa", "torch's fused kernel does causal attention without a table")
    elif device.type == "cpu":
        backend = AttentionBackend("tiles", "on a CPU torch's fused kernel takes the table as its mask")
    elif (obstacle := flex_obstacle(device, dtype, dims, queries, few_keys)) is None:
        backend = AttentionBackend("flex", "FlexAttention and the kernel of the table's gradient take it")
    else:
        backend = AttentionBackend("blocks", obstacle)
    if option == "fused" and backend.name == "blocks" and queries == "all" and not few_keys:
        raise UserError(f"model.attention: got 'fused', but {backend.reason}; use auto, which computes in blocks")
    if backend not in backends_used:
        backends_used[backend] = None
        logger.info("attention: %s, because %s", backend.name, backend.reason)
    return backend.name


# what torch.compiler.assume_constant_result does; that function would import the compiler here
select._dynamo_marked_constant = True  # type: ignore[attr-defined]


def flex_obstacle(
    device: torch.device, dtype: torch.dtype, dims: tuple[int, int], queries: str, few_keys: bool
) -> str | None:
    """Return why FlexAttention and the kernel of the table's gradient cannot be used, or None if they can."""
    if device.type != "cuda":
        return f"there is no fused kernel with a table on {device.type}"
    if few_keys:
        return f"up to {FEW_KEYS} keys are processed in fp32, without a fused kernel"
    if queries != "all":
        return "no fused kernel with a table supports fewer queries than keys"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the fused kernels take bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if any(not HEAD_DIMS[0] <= dim <= HEAD_DIMS[1] for dim in dims):
        given = " and ".join(map(str, dims))
        return f"the fused kernels take head dimensions from {HEAD_DIMS[0]} to {HEAD_DIMS[1]}, not {given}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        name = torch.cuda.get_device_name(device)
        return f"the fused kernels need compute capability 8.0, and {name} has {capability[0]}.{capability[1]}"
    if find_spec("triton") is None:
        return "the fused kernels need Triton, which is not installed"
    return None
