"""Choice of the implementation of attention, which is made here alone, and logged once with its reason."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch

from kerple.base.errors import UserError

AttentionOption = Literal["auto", "fused", "blocks", "reference"]
Way = Literal["sdpa", "tiles", "flex", "blocks", "reference"]

SHORT = 256  # keys; up to here the backward pass in tiles is faster than that of torch's fused kernel on the CPU
TINY = 16  # keys; so few gain no time from bf16, and lose most precision
DIMS = (16, 128)  # of a head; FlexAttention raises below, and above its kernels exceed the chip's shared memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """An implementation, and why it was chosen.

    - ``sdpa`` is torch's fused attention without a table.
    - ``tiles`` is torch's fused kernel on the CPU with the table as its mask, and a backward pass of our own (`cpu`).
    - ``flex`` is FlexAttention with the kernel of the table's gradient, on a GPU (`cuda`).
    - ``blocks`` is explicit scores in blocks of queries, on any device (`blocks`).
    - ``reference`` is explicit scores of T × T.
    """

    way: Way
    reason: str


taken: dict[Choice, None] = {}  # choices since `forget`, in the order of their first use


def forget() -> None:
    """Clear the record of choices, so that each is logged again at its first use."""
    taken.clear()


def choose(
    asked: AttentionOption,
    device: torch.device,
    dtype: torch.dtype,
    dims: tuple[int, int],
    queries: Literal["all", "one", "last"],
    keys: Literal["tiny", "short", "long"],
    table: bool,
    window: bool,
    content: bool,
    gradient: bool,
) -> Way:
    """Choose an implementation, and log a choice that is new. In a compiled network this runs while a call is traced.

    Args:
        asked: ``auto`` for the fastest that is possible; ``fused`` is an error if training or evaluation would be done
            in blocks; ``blocks`` and ``reference`` force these.
        device: Device of the tensors.
        dtype: Dtype of q, k and v after autocast.
        dims: Dimensions δ of q and k, and δ' of v.
        queries: Whether the queries are all rows, one row, or some of the last rows.
        keys: Whether there are at most `TINY` keys, at most `SHORT`, or more.
        table: Whether a bias by distance is added.
        window: Whether a window hides some keys.
        content: Whether the strategy needs what no fused kernel has: weights by distance, or its own scores or values.
        gradient: Whether a backward pass may follow.

    Raises:
        UserError: If ``fused`` was asked for, and no fused implementation is possible.
    """
    choice = _decide(asked, device, dtype, dims, queries, keys, table, window, content, gradient)
    if asked == "fused" and choice.way == "blocks" and queries == "all" and keys != "tiny":
        raise UserError(
            f"model.attention: got 'fused', but {choice.reason}; take auto, which computes this in blocks of queries"
        )
    if choice not in taken:
        taken[choice] = None
        logger.info("attention: %s, because %s", choice.way, choice.reason)
    return choice.way


choose._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result, without importing the compiler here


def _decide(
    asked: AttentionOption,
    device: torch.device,
    dtype: torch.dtype,
    dims: tuple[int, int],
    queries: str,
    keys: str,
    table: bool,
    window: bool,
    content: bool,
    gradient: bool,
) -> Choice:
    if asked in ("blocks", "reference"):
        return Choice(asked, "it was asked for")
    if content:
        return Choice("blocks", "no fused kernel knows this strategy's weights, scores or values")
    # torch's causal mask takes the queries for the first rows instead of the last
    plain = not table and not window and queries in ("all", "one")
    if device.type == "cpu":
        # short sequences are faster by the table's backward pass than by torch's, even with a table of zeros
        if plain and not (keys == "short" and gradient):
            return Choice("sdpa", "torch's fused kernel does causal attention without a table")
        return Choice("tiles", "on a CPU torch's fused kernel takes the table as its mask")
    if plain:
        return Choice("sdpa", "torch's fused kernel does causal attention without a table")
    reason = _unfit(device, dtype, dims, queries, keys)
    if reason is None:
        return Choice("flex", "FlexAttention and the kernel of the table's gradient take it")
    return Choice("blocks", reason)


def _unfit(device: torch.device, dtype: torch.dtype, dims: tuple[int, int], queries: str, keys: str) -> str | None:
    """Why FlexAttention and the kernel of the table's gradient are not possible, or None if they are."""
    if device.type != "cuda":
        return f"there is no fused kernel with a table on {device.type}"
    if keys == "tiny":
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
def explained(what: str, device: torch.device, instead: str) -> Iterator[None]:
    """Context that explains an error of the compiler or the chip: what was computed, and which option avoids it.

    Args:
        what: What is computed, for the message.
        device: Device on which it is computed.
        instead: The option that avoids it.

    Raises:
        RuntimeError: Dynamo, Inductor or Triton has failed; its error is the cause.
    """
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "triton")):
            raise
        chip = torch.cuda.get_device_name(device) if device.type == "cuda" else device
        raise RuntimeError(
            f"{what} on {chip} fails with {type(error).__name__}, see above; {instead} does without it"
        ) from error
