"""`attend`: checks its arguments, selects an implementation, and calls it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch._functorch import config

from kerple.attention.backend_selection import FEW_KEYS, AttentionOption, select
from kerple.attention.fused import attend_fused, attend_sdpa, cpu_kernel, gpu_kernel
from kerple.attention.query_block_attention import attend_blocks
from kerple.attention.reference import attend_reference
from kerple.attention.spec import UNMODIFIED, AttentionSpec
from kerple.base.bf16 import emulates_bf16
from kerple.base.errors import require
from kerple.positions.fp32_matmul import refuse_tangents
from kerple.positions.token_positions import readable

# by default, autocast would round fp32 factors such as scores in the backward pass of compiled networks
config.backward_pass_autocast = "off"

BACKENDS: dict[str, Callable[[Tensor, Tensor, Tensor, AttentionSpec], Tensor]] = {
    "sdpa": attend_sdpa,
    "tiles": partial(attend_fused, cpu_kernel),
    "flex": partial(attend_fused, gpu_kernel),
    "blocks": attend_blocks,
    "reference": attend_reference,
}
"""Implementations by the names of `kerple.attention.backend_selection.AttentionBackend`."""
FEW_EXTENTS = 8  # up to this length, in extents, near keys are most of the work, and far keys get no own kernel


def attend(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec = UNMODIFIED, option: AttentionOption = "auto"
) -> Tensor:
    """Causal attention, softmax(q·k/√δ + bias)·v, with the modifications of a strategy.

    B is the batch size, H the number of query heads, and G the number of key heads. Tq queries attend to Tk keys. The
    queries belong to the last Tq keys: to all keys in training, and to the newest keys in generation with a cache.

    Scores, softmax and the gradient of the table are fp32 (fp64 for fp64 input). No implementation rounds q·k to bf16
    before the softmax. Under autocast, q, k and v are cast to its dtype, except fp64. A CPU without bf16 instructions
    computes all products of bf16 in fp32, which is faster there. On CUDA, gradients may differ in the last bit between
    runs if torch's ``sdpa`` is used, or if functions of the strategy gather or scatter values. All other gradients are
    deterministic.

    Args:
        q: Queries (B, H, Tq, δ), Tq <= Tk, with any strides. With `AttentionSpec.neighbor_window` the last dimension
            contains two halves.
        k: Keys (B, G, Tk, δ) in the dtype of ``q``. G divides H, and query head h uses key head h // (H / G).
        v: Values (B, G, Tk, δ') in the dtype of ``q``, δ' <= δ.
        spec: Modifications of the strategy.
        option: ``auto``, or the implementation to use; see `kerple.attention.backend_selection.select`.

    Returns:
        Tensor (B, H, Tq, δ') in the dtype of ``q`` after autocast.

    Raises:
        UserError: If shapes or dtypes do not match, or ``option`` is ``fused``, and no fused implementation supports
            this call.
    """
    refuse_tangents(q, k, v, spec.table, spec.score_scale, spec.key_bias, spec.sink)
    check_inputs(q, k, v, spec)
    device = q.device.type
    if torch.is_autocast_enabled(device) and q.dtype != torch.float64:
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    dtype, score_dtype = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, spec = normalise(q, k, spec, score_dtype)
    backend = select_backend(q, k, v, spec, option)
    emulated = dtype == torch.bfloat16 and emulates_bf16(q)
    if emulated or backend == "reference" or (backend != "sdpa" and k.shape[2] <= FEW_KEYS):
        q, k, v = (x.to(score_dtype) for x in (q, k, v))
    return BACKENDS[backend](q, k, v, spec).to(dtype)


def normalise(
    q: Tensor, k: Tensor, spec: AttentionSpec, score_dtype: torch.dtype
) -> tuple[Tensor, Tensor, AttentionSpec]:
    """Return queries, keys and their modifications without a window, first keys or halves that have no effect.

    The scale is a number, and tables and the sink have the dtype of the scores.

    Raises:
        UserError: If ``spec.first_key`` decreases from query to query. It is not checked on a GPU and in compiled code.
    """
    length, scale = k.shape[2], spec.scale_of(q)
    window = None if spec.window is None or spec.window >= length else spec.window
    first_keys = 0 if window is None else spec.first_keys
    neighbors = spec.neighbor_window
    if neighbors is not None and neighbors >= (length if first_keys else window or length):
        q, k, neighbors = q.chunk(2, -1)[0], k.chunk(2, -1)[0], None  # all keys are near: the first halves are enough
    tables = (spec.table, spec.score_scale, spec.sink)
    table, score_scale, sink = (None if x is None else x.to(score_dtype) for x in tables)
    first_key = spec.first_key
    if first_key is not None:  # a query sees its own key, even in padding
        first_key = first_key.minimum(torch.arange(length - q.shape[2], length, device=q.device))
        if readable(first_key):
            expected = "rows that do not decrease from query to query, as in consecutive documents"
            require(bool((first_key.diff() >= 0).all()), "first_key", "decreasing rows", expected)
    spec = replace(spec, scale=scale, table=table, score_scale=score_scale, window=window, sink=sink)
    return q, k, replace(spec, first_keys=first_keys, neighbor_window=neighbors, first_key=first_key)


def select_backend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, option: AttentionOption) -> str:
    """Return the name of the implementation for these arguments of `attend`, after `normalise`."""
    queries, length = q.shape[2], k.shape[2]
    extent = None if spec.query_bias is None and spec.value_bias is None else spec.extent
    # for few far keys, the second pass costs more than it saves; with gaps, rows are no distances
    gaps = spec.keys is not None and not spec.keys.contiguous
    near_is_all = extent is not None and (gaps or FEW_EXTENTS * extent >= min(length, spec.window or length))
    unfused = any(x is not None for x in (spec.more_keys, spec.modify_scores, spec.add_to_output))
    unfused |= q.device.type != "cpu" and (spec.key_bias is not None or spec.score_scale is not None)
    exclusive = [x is not None for x in (extent, spec.key_bias, spec.neighbor_window)]
    return select(
        option,
        device=q.device,
        dtype=q.dtype,
        dims=(q.shape[3] if spec.neighbor_window is None else q.shape[3] // 2, v.shape[3]),
        queries="all" if queries == length else "one" if queries == 1 else "last",
        few_keys=length <= FEW_KEYS,
        # a sink and two halves need the log-sum-exp, which the kernels for tables return and torch's sdpa does not
        table_kernel=any(exclusive) or any(x is not None for x in (spec.table, spec.score_scale, spec.sink)),
        hidden_keys=spec.window is not None or spec.first_key is not None,
        explicit_scores=spec.first_keys > 0 or near_is_all or unfused or sum(exclusive) > 1,
    )


def check_inputs(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> None:
    """Raise a UserError if shapes or dtypes of the arguments of `attend` do not match."""
    heads, queries, length = q.shape[1], q.shape[2], k.shape[2]
    shapes = f"shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
    alike = q.ndim == 4 and k.shape[:3] == v.shape[:3] and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    dim = q.shape[-1] // (1 if spec.neighbor_window is None else 2)
    require(alike and v.shape[3] <= dim, "q, k, v", shapes, "(B, H, Tq, δ), (B, G, Tk, δ), (B, G, Tk, δ' <= δ)")
    # with an empty dimension torch's fused kernel would divide by 0
    require(0 not in (*q.shape, k.shape[1]), "q, k, v", shapes, "at least 1 sequence, head, row and dimension")
    require(heads % k.shape[1] == 0, "q, k, v", f"{heads} heads of q", f"a multiple of the {k.shape[1]} of k")
    require(queries <= length, "q", f"{queries} queries for {length} keys", "at most as many queries as keys")
    require(q.dtype == k.dtype == v.dtype, "q, k, v", f"dtypes {q.dtype}, {k.dtype}, {v.dtype}", "the same dtype")
    for name, number in (("window", spec.window), ("neighbor_window", spec.neighbor_window)):
        require(number is None or number >= 1, name, number, "at least 1 key")
    for name, x in (("table", spec.table), ("score_scale", spec.score_scale)):
        if x is not None:
            fits = x.ndim == 2 and x.shape[0] == heads and x.shape[1] >= length
            require(fits, name, f"shape {tuple(x.shape)}", f"(H, >= Tk) = ({heads}, >= {length})")
    if spec.key_bias is not None:
        shape = tuple(spec.key_bias.shape)
        require(shape == (q.shape[0], heads, length), "key_bias", f"shape {shape}", "(B, H, Tk) of q and k")
    if spec.sink is not None:
        shape = tuple(spec.sink.shape)
        fits = shape in (q.shape[1:2], q.shape[:3])
        require(fits, "sink", f"shape {shape}", f"(H,) or (B, H, Tq) of q {tuple(q.shape)}")
    if spec.first_key is not None:
        shape, dtype = tuple(spec.first_key.shape), spec.first_key.dtype
        fits = shape == (q.shape[0], queries) and dtype == torch.int64
        require(fits, "first_key", f"shape {shape} {dtype}", f"(B, Tq) = {q.shape[0], queries} torch.int64")
