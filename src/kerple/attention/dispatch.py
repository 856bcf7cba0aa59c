"""`attend`: checks its arguments, selects an implementation, and calls it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kerple.attention.backend_selection import FEW_KEYS, AttentionOption, select
from kerple.attention.cpu import table_attention
from kerple.attention.query_block_attention import attend_blocks
from kerple.attention.reference import attend_reference
from kerple.attention.spec import UNMODIFIED, AttentionSpec, repeat_for_query_heads, sink_of_queries
from kerple.base.errors import require

Fused = Callable[[Tensor, Tensor, Tensor, Tensor | None, int | None], tuple[Tensor, Tensor]]
"""Function of q, k, v, table and window that returns the output and the log-sum-exp of the scores."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec = UNMODIFIED, option: AttentionOption = "auto"
) -> Tensor:
    """Causal attention, softmax(q·k/√δ + bias)·v, with the modifications of a strategy.

    B is the batch size, H the number of query heads, and G the number of key heads. Tq queries attend to Tk keys. The
    queries belong to the last Tq keys: to all keys in training, and to the newest keys in generation with a cache.

    Scores, softmax and the gradient of the table are fp32 (fp64 for fp64 input). No implementation rounds q·k to bf16
    before the softmax. Under autocast, q, k and v are cast to its dtype, except fp64. On CUDA, gradients may differ in
    the last bit between runs if torch's ``sdpa`` is used, or if functions of the strategy gather or scatter values. All
    other gradients are deterministic.

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
    check_inputs(q, k, v, spec)
    device = q.device.type
    if torch.is_autocast_enabled(device) and q.dtype != torch.float64:
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    queries, length, value_dim = q.shape[2], k.shape[2], v.shape[3]
    scale = q.shape[3] ** -0.5 if spec.scale is None else spec.scale
    window = None if spec.window is None or spec.window >= length else spec.window
    neighbors = spec.neighbor_window
    if neighbors is not None and neighbors >= (length if spec.first else window or length):
        q, k, neighbors = q.chunk(2, -1)[0], k.chunk(2, -1)[0], None  # all keys are near: the first halves are enough
    dim = q.shape[3] if neighbors is None else q.shape[3] // 2
    unfused_modifications = (spec.weight, spec.more_keys, spec.modify_scores, spec.add_to_output)
    backend = select(
        option,
        device=q.device,
        dtype=q.dtype,
        dims=(dim, value_dim),
        queries="all" if queries == length else "one" if queries == 1 else "last",
        few_keys=length <= FEW_KEYS,
        # a sink and two halves need the log-sum-exp, which the kernels for tables return and torch's sdpa does not
        table=spec.table is not None or spec.sink is not None or neighbors is not None,
        window=window is not None,
        explicit_scores=spec.first > 0 or any(modification is not None for modification in unfused_modifications),
    )
    if backend in ("sdpa", "tiles") and value_dim < dim:  # torch's kernels need equal head dimensions of q and v
        v = F.pad(v, (0, dim - value_dim))
    if backend == "sdpa":
        if k.shape[1] < q.shape[1] and device == "cuda" and q.dtype == torch.float32:
            # torch's fused kernels for G < H need 16-bit input; for fp32 torch would store T × T scores
            k, v = repeat_for_query_heads(q, k, v)
        grouped = k.shape[1] < q.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=queries > 1, scale=scale, enable_gqa=grouped)
        return out[..., :value_dim]
    dtype, score_dtype = q.dtype, torch.promote_types(q.dtype, torch.float32)
    if length <= FEW_KEYS or backend == "reference":
        q, k, v = (x.to(score_dtype) for x in (q, k, v))
    table, weight, sink = (None if x is None else x.to(score_dtype) for x in (spec.table, spec.weight, spec.sink))
    spec = replace(spec, scale=scale, window=window, table=table, weight=weight, sink=sink, neighbor_window=neighbors)

    def fused(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, window: int | None) -> tuple[Tensor, Tensor]:
        if backend == "flex":
            from kerple.attention.cuda import attend_flex  # imported here, because this import is slow

            return attend_flex(q, k, v, table, window, scale, sink is not None or neighbors is not None)
        k, v = repeat_for_query_heads(q, k, v)
        if table is None:
            table = q.new_zeros(q.shape[1], k.shape[2], dtype=score_dtype)
        return table_attention(q, k, v, table, window, scale)

    if backend in ("flex", "tiles"):
        attention = fused if neighbors is None else partial(attend_halves, fused, neighbors)
        out, lse = attention(q, k, v, table, window)
        if sink is not None:
            key_probability = torch.sigmoid(lse - sink_of_queries(sink))[..., None]  # sum over keys, (B, H, Tq, 1)
            out = (out * key_probability).to(out.dtype)
    elif backend == "blocks":
        out = attend_blocks(q, k, v, spec)
    else:
        with torch.autocast(device, enabled=False):
            out = attend_reference(q, k, v, spec)
    return out[..., :value_dim].to(dtype)


def attend_halves(
    attention: Fused, neighbors: int, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, window: int | None
) -> tuple[Tensor, Tensor]:
    """Attention to near keys with the first halves of q and k, and to far keys with the second halves.

    Near keys are the last ``neighbors`` keys up to the query, and far keys are all earlier keys. The two outputs are
    merged by their log-sum-exps. Attention to far keys is also causal: query m sees the keys up to m - neighbors.

    Args:
        attention: Function for one set of keys.
        neighbors: Number of near keys, including the query's own.
        q: Queries (B, H, Tq, 2δ).
        k: Keys (B, G, Tk, 2δ), Tk > neighbors.
        v: Values (B, G, Tk, δ').
        table: Attention bias by distance, (H, >= Tk), or None.
        window: Number of near and far keys that a query sees, more than ``neighbors``; None for all.

    Returns:
        The output (B, H, Tq, δ') in the dtype of q, and the log-sum-exp (B, H, Tq) over all keys.
    """
    (near_q, far_q), (near_k, far_k) = q.chunk(2, -1), k.chunk(2, -1)
    near, near_lse = attention(near_q, near_k, v, table, neighbors)
    keys = k.shape[2] - neighbors
    queries = min(q.shape[2], keys)  # only the last queries see far keys
    far_table = None if table is None else table[:, neighbors:]
    far_window = None if window is None else window - neighbors
    far, far_lse = attention(far_q[:, :, -queries:], far_k[:, :, :keys], v[:, :, :keys], far_table, far_window)
    far = F.pad(far, (0, 0, q.shape[2] - queries, 0))
    far_lse = F.pad(far_lse, (q.shape[2] - queries, 0), value=-torch.inf)
    fraction = torch.sigmoid(far_lse - near_lse)[..., None]  # probability of all far keys, (B, H, Tq, 1)
    out = torch.lerp(near.to(fraction.dtype), far.to(fraction.dtype), fraction)
    return out.to(near.dtype), torch.logaddexp(near_lse, far_lse)


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
    for name, x in (("table", spec.table), ("weight", spec.weight)):
        if x is not None:
            fits = x.ndim == 2 and x.shape[0] == heads and x.shape[1] >= length
            require(fits, name, f"shape {tuple(x.shape)}", f"(H, >= Tk) = ({heads}, >= {length})")
    if spec.sink is not None:
        shape = tuple(spec.sink.shape)
        fits = shape in (q.shape[1:2], q.shape[:3])
        require(fits, "sink", f"shape {shape}", f"(H,) or (B, H, Tq) of q {tuple(q.shape)}")
