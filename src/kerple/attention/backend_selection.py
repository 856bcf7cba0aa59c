"""Selection of the implementation of attention. Each implementation is logged at its first use, with the reason."""

import logging
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch

from kerple.base.errors import UserError

AttentionOption = Literal["auto", "fused", "blocks", "reference"]
"""Values of the option `model.attention`; see `kerple.model.architecture.Architecture`."""

FEW_KEYS = 16  # for at most this number of keys, all backends except sdpa use fp32, because bf16 would save no time
HEAD_DIMS = (16, 128)  # FlexAttention refuses smaller ones, and for larger ones its kernels exceed shared memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttentionBackend:
    """Implementation of attention, and the reason for its selection.

    Fused kernels do not store the scores of all queries and keys. Explicit scores are stored, as a tensor. The table
    contains the bias of each head by distance, (H, T).

    - ``sdpa``: `torch.nn.functional.scaled_dot_product_attention`, for causal attention without modifications.
    - ``tiles``: On the CPU, torch's fused kernel with table and window as its mask, or a forward pass in tiles, and a
      backward pass in tiles (`kerple.attention.cpu`).
    - ``flex``: On GPUs, FlexAttention, and a kernel for the gradient of the table (`kerple.attention.cuda`).
    - ``blocks``: On any device, explicit scores for one block of queries at a time
      (`kerple.attention.query_block_attention`).
    - ``reference``: On any device, explicit scores of all queries and keys (`kerple.attention.reference`).
    """

    name: Literal["sdpa", "tiles", "flex", "blocks", "reference"]
    reason: str


backends_used: dict[AttentionBackend, None] = {}
"""Backends in the order of their first use. After ``clear()`` each is logged again at its next use."""


# separate arguments, because torch.compile cannot pass a dataclass to a function marked as constant (see below)
def select(
    option: AttentionOption,
    *,
    device: torch.device,
    dtype: torch.dtype,
    dims: tuple[int, int],
    queries: Literal["all", "one", "last"],
    few_keys: bool,
    table_kernel: bool,
    hidden_keys: bool,
    explicit_scores: bool,
) -> str:
    """Return the name of the backend of a call, and log the backend at its first use.

    In a compiled network this function runs during tracing.

    Args:
        option: ``auto`` selects the fastest possible backend. ``fused`` does the same, but raises an error if that
            backend is ``blocks``. Calls with fewer queries than keys or with few keys raise no error, because
            generation with a cache needs them. ``blocks`` and ``reference`` select these backends.
        device: Device of the tensors.
        dtype: Dtype of q, k and v after autocast.
        dims: Head dimension of q and k, and head dimension of v.
        queries: Which tokens are queries: ``all``, ``one`` (only the last token) or ``last`` (several last tokens).
        few_keys: Whether there are at most `FEW_KEYS` keys.
        table_kernel: Whether a kernel for tables is needed: to add a bias, to multiply scores by a factor, or to return
            the log-sum-exp, which ``sdpa`` does not return.
        hidden_keys: Whether a window or other documents hide some earlier keys.
        explicit_scores: Whether the strategy needs what no fused kernel supports: replaced scores, additional terms of
            the output, additional keys, or queries that see the first tokens of the input although these are outside
            the window.

    Raises:
        UserError: If the option is ``fused``, the backend is ``blocks``, ``queries`` is ``all``, and there are more
            than `FEW_KEYS` keys.
    """
    # not if ``queries`` is ``last``, because the causal mask of torch's kernel treats queries as the first tokens
    plain = not table_kernel and not hidden_keys and queries in ("all", "one")
    if option in ("blocks", "reference"):
        backend = AttentionBackend(option, "model.attention selects it")
    elif explicit_scores:
        reason = "model.position or the window needs explicit scores, which no fused kernel has"
        backend = AttentionBackend("blocks", reason)
    elif plain:
        backend = AttentionBackend("sdpa", "torch's fused kernel supports causal attention without a bias")
    elif device.type == "cpu":
        backend = AttentionBackend("tiles", "torch's fused CPU kernel takes bias and hidden keys as a mask")
    elif (obstacle := flex_obstacle(device, dtype, dims, queries, few_keys)) is None:
        backend = AttentionBackend("flex", "FlexAttention supports bias, hidden keys and log-sum-exp")
    else:
        backend = AttentionBackend("blocks", obstacle)
    if option == "fused" and backend.name == "blocks" and queries == "all" and not few_keys:
        raise UserError(f"model.attention: got 'fused', but {backend.reason}; use auto, which selects blocks")
    if backend not in backends_used:
        backends_used[backend] = None
        logger.info("attention: %s, because %s", backend.name, backend.reason)
    return backend.name


# sets the mark that torch.compiler.assume_constant_result sets, without its slow import of the compiler
select._dynamo_marked_constant = True  # type: ignore[attr-defined]


def flex_obstacle(
    device: torch.device, dtype: torch.dtype, dims: tuple[int, int], queries: str, few_keys: bool
) -> str | None:
    """Return why FlexAttention and the kernel for the table's gradient cannot be used, or None if they can."""
    if device.type != "cuda":
        return f"there is no fused kernel with a bias on {device.type}"
    if few_keys:
        return f"up to {FEW_KEYS} keys are processed in fp32, without a fused kernel"
    if queries != "all":
        return "no fused kernel with a bias supports fewer queries than keys"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the fused kernels take bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if any(not HEAD_DIMS[0] <= dim <= HEAD_DIMS[1] for dim in dims):
        given = " and ".join(map(str, dims))
        return f"the fused kernels take head dimensions from {HEAD_DIMS[0]} to {HEAD_DIMS[1]}, not {given}"
    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        name = torch.cuda.get_device_name(device)
        given = ".".join(map(str, capability))
        return f"the fused kernels need compute capability 8.0 or higher, and {name} has {given}"
    if find_spec("triton") is None:
        return "the fused kernels need Triton, which is not installed"
    return None
