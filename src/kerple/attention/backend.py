"""Selection of the implementation of attention; it is made here alone, and each is logged once with its reason."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch

from kerple.base.errors import UserError

AttentionOption = Literal["auto", "fused", "blocks", "reference"]
"""The values of `model.attention`, which `kerple.model.architecture.Architecture` explains."""

TINY = 16  # number of keys up to which attention is computed in fp32: so few gain no time from bf16
DIMS = (16, 128)  # of a head; FlexAttention raises below, and above its kernels exceed the chip's shared memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttentionBackend:
    """An implementation, and the reason for it.

    - ``sdpa`` is torch's fused attention without a table.
    - ``tiles`` is for the CPU. Forward it is torch's fused kernel with the table as its mask, backward our own in tiles
      (`cpu`).
    - ``flex`` is FlexAttention with the kernel of the table's gradient, on a GPU (`cuda`).
    - ``blocks`` is explicit scores in blocks of queries, on any device (`blocks`).
    - ``reference`` is explicit scores of T × T.
    """

    name: Literal["sdpa", "tiles", "flex", "blocks", "reference"]
    reason: str


used: dict[AttentionBackend, None] = {}
"""The backends since `forget`, in the order of their first use."""


def forget_used() -> None:
    """Clear `used`, so that each backend is logged again at its first use."""
    used.clear()


def select(
    option: AttentionOption,
    device: torch.device,
    dtype: torch.dtype,
    dims: tuple[int, int],
    queries: Literal["all", "one", "last"],
    tiny: bool,
    table: bool,
    window: bool,
    explicit: bool,
) -> str:
    """Name of the backend of a call, which is logged if it is new. In a compiled network this runs during tracing.

    Args:
        option: ``auto`` for the fastest that is possible; ``fused`` is an error if training or evaluation would be done
            in blocks; ``blocks`` and ``reference`` force these.
        device: Device of the tensors.
        dtype: Dtype of q, k and v after autocast.
        dims: Dimensions δ of q and k, and δ' of v.
        queries: Whether the queries are all rows, one row, or some of the last rows.
        tiny: Whether there are at most `TINY` keys.
        table: Whether a bias by distance is added.
        window: Whether a window hides some keys.
        explicit: Whether the strategy needs explicit scores: weights by distance, or its own scores or output.

    Raises:
        UserError: If the option is ``fused``, and no fused implementation is possible.
    """
    # torch's causal mask takes the queries for the first rows instead of the last
    plain = not table and not window and queries in ("all", "one")
    if option in ("blocks", "reference"):
        backend = AttentionBackend(option, "model.attention says so")
    elif explicit:
        backend = AttentionBackend("blocks", "no fused kernel has this strategy's weights, scores or output")
    elif plain:
        backend = AttentionBackend("sdpa", "torch's fused kernel does causal attention without a table")
    elif device.type == "cpu":
        backend = AttentionBackend("tiles", "on a CPU torch's fused kernel takes the table as its mask")
    elif (obstacle := _obstacle(device, dtype, dims, queries, tiny)) is None:
        backend = AttentionBackend("flex", "FlexAttention and the kernel of the table's gradient take it")
    else:
        backend = AttentionBackend("blocks", obstacle)
    if option == "fused" and backend.name == "blocks" and queries == "all" and not tiny:
        raise UserError(f"model.attention: got 'fused', but {backend.reason}; take auto, which computes in blocks")
    if backend not in used:
        used[backend] = None
        logger.info("attention: %s, because %s", backend.name, backend.reason)
    return backend.name


select._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result, without importing the compiler here


def _obstacle(device: torch.device, dtype: torch.dtype, dims: tuple[int, int], queries: str, tiny: bool) -> str | None:
    """Return why FlexAttention and the kernel of the table's gradient are not possible, or None if they are."""
    if device.type != "cuda":
        return f"there is no fused kernel with a table on {device.type}"
    if tiny:
        return f"{TINY} keys and fewer are done in fp32, without a fused kernel"
    if queries != "all":
        return "some of the last rows, against keys from a cache, have no fused kernel with a table"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the fused kernels take bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if any(not DIMS[0] <= dim <= DIMS[1] for dim in dims):
        return f"the fused kernels take heads of {DIMS[0]} to {DIMS[1]} dimensions, not {' and '.join(map(str, dims))}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"the fused kernels need capability 8.0, and {torch.cuda.get_device_name(device)} has {capability}"
    if find_spec("triton") is None:
        return "the fused kernels need Triton, which is not installed"
    return None


@contextmanager
def note_on_failure(note: str) -> Iterator[None]:
    """Context in which an error of the compiler or of the chip gets a note, such as the option that avoids it."""
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise
