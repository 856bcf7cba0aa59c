"""`attend`: checks its arguments, selects an implementation, and calls it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kerple.attention.backend import FEW_KEYS, AttentionOption, select
from kerple.attention.blocks import attend_blocks
from kerple.attention.cpu import table_attention
from kerple.attention.reference import attend_reference
from kerple.attention.spec import UNMODIFIED, AttentionSpec, repeat_for_query_heads, sink_of_queries

Fused = Callable[[Tensor, Tensor, Tensor, Tensor | None, int | None], tuple[Tensor, Tensor]]


def attend(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec = UNMODIFIED, option: AttentionOption = "auto"
) -> Tensor:
    """Causal attention, softmax(q·k/√δ + bias)·v, with the modifications of a strategy.

    The distance from query row m to key row n is d = m - n. The queries are the last Tq of the Tk rows: all rows in
    training, the newest rows when keys come from a cache. Scores, softmax and the table's gradient are fp32 (fp64 for
    fp64 input). Gradients are deterministic, except on CUDA with torch's ``sdpa``, or if a strategy gathers or
    scatters. Under autocast, q, k, v are cast to its dtype, unless they are fp64. No backend rounds q·k to bf16 before
    the softmax.

    Args:
        q: (B, H, Tq, δ), Tq <= Tk. Any strides.
        k: (B, G, Tk, δ) in the dtype of ``q``; query head h uses key head h // (H / G).
        v: (B, G, Tk, δ') in the dtype of ``q``, δ' <= δ.
        spec: Modifications of the strategy.
        option: ``auto``, or the implementation to use; see `kerple.attention.backend.select`.

    Returns:
        (B, H, Tq, δ') in the dtype of ``q``, or of autocast if it is enabled.

    Raises:
        ValueError: If shapes or dtypes do not fit together.
    """
    check_inputs(q, k, v, spec)
    device = q.device.type
    if torch.is_autocast_enabled(device) and q.dtype != torch.float64:
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    queries, length, width = q.shape[2], k.shape[2], v.shape[3]
    scale = q.shape[3] ** -0.5 if spec.scale is None else spec.scale
    window = None if spec.window is None or spec.window >= length else spec.window
    neighbors, views = spec.neighbor_window, 1 if spec.neighbor_window is None else 2
    if neighbors is not None and neighbors >= (length if spec.first else window or length):  # no key is far
        q, k, neighbors, views = q.chunk(2, -1)[0], k.chunk(2, -1)[0], None, 1
    explicit = (spec.weight, spec.more_keys, spec.modify_scores, spec.add_to_output)
    backend = select(
        option,
        device=q.device,
        dtype=q.dtype,
        dims=(q.shape[3] // views, width),
        queries="all" if queries == length else "one" if queries == 1 else "last",
        few_keys=length <= FEW_KEYS,
        # torch's own attention does not return the log-sum-exp, which a sink and two views need
        table=spec.table is not None or spec.sink is not None or neighbors is not None,
        window=window is not None,
        explicit=any(x is not None for x in explicit) or spec.first > 0,
    )
    if backend in ("sdpa", "tiles") and width < q.shape[3] // views:  # torch's kernels need v as wide as q
        v = F.pad(v, (0, q.shape[3] // views - width))
    if backend == "sdpa":
        grouped = k.shape[1] < q.shape[1]
        if grouped and device == "cuda" and q.dtype == torch.float32:
            # torch's kernels for grouped heads need half precision; for fp32 torch would store T × T scores
            k, v = repeat_for_query_heads(q, k, v)
            grouped = False
        out = F.scaled_dot_product_attention(q, k, v, is_causal=queries > 1, scale=scale, enable_gqa=grouped)
        return out[..., :width]
    dtype, precise = q.dtype, torch.promote_types(q.dtype, torch.float32)
    if length <= FEW_KEYS or backend == "reference":
        q, k, v = (x.to(precise) for x in (q, k, v))
    table, weight, sink = (None if x is None else x.to(precise) for x in (spec.table, spec.weight, spec.sink))
    spec = replace(spec, scale=scale, window=window, table=table, weight=weight, sink=sink, neighbor_window=neighbors)

    def fused(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, window: int | None) -> tuple[Tensor, Tensor]:
        if backend == "flex":
            from kerple.attention.cuda import attend_flex  # slow to import, and not available on every machine

            return attend_flex(q, k, v, table, window, scale, sink is not None or neighbors is not None)
        k, v = repeat_for_query_heads(q, k, v)
        if table is None:
            table = q.new_zeros(q.shape[1], k.shape[2], dtype=precise)
        return table_attention(q, k, v, table, window, table.requires_grad, scale)

    if backend in ("flex", "tiles"):
        attention = fused if neighbors is None else partial(two_views, fused, neighbors)
        out, lse = attention(q, k, v, table, window)
        if sink is not None:  # the total probability of the keys, (B, H, Tq, 1), multiplies the output
            out = (out * torch.sigmoid(lse - sink_of_queries(sink))[..., None]).to(out.dtype)
    elif backend == "blocks":
        out = attend_blocks(q, k, v, spec)
    else:
        with torch.autocast(device, enabled=False):
            out = attend_reference(q, k, v, spec)
    return out[..., :width].to(dtype)


def two_views(
    attention: Fused, neighbors: int, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, window: int | None
) -> tuple[Tensor, Tensor]:
    """Attention to the last ``neighbors`` keys and attention to earlier keys, merged by their log-sum-exps.

    Attention to the earlier (far) keys is causal too: query m sees the keys up to m - neighbors.

    Args:
        attention: Function of q, k, v, table and window that returns an output and a log-sum-exp.
        neighbors: Number of near keys.
        q: (B, H, Tq, 2δ): the halves for near keys, followed by the halves for far keys.
        k: (B, G, Tk, 2δ) likewise, Tk > neighbors.
        v: (B, G, Tk, δ').
        table: (H, >= Tk) or None.
        window: Number of near and far keys that a query sees, more than ``neighbors``; None for all.

    Returns:
        (B, H, Tq, δ') in the dtype of q, and the log-sum-exp (B, H, Tq) over both views.
    """
    (near_q, far_q), (near_k, far_k) = q.chunk(2, -1), k.chunk(2, -1)
    near, near_lse = attention(near_q, near_k, v, table, neighbors)
    keys = k.shape[2] - neighbors
    queries = min(q.shape[2], keys)  # only the last queries see far keys
    tables = None if table is None else table[:, neighbors:]
    windows = None if window is None else window - neighbors
    far, far_lse = attention(far_q[:, :, -queries:], far_k[:, :, :keys], v[:, :, :keys], tables, windows)
    far = F.pad(far, (0, 0, q.shape[2] - queries, 0))
    far_lse = F.pad(far_lse, (q.shape[2] - queries, 0), value=-torch.inf)
    fraction = torch.sigmoid(far_lse - near_lse)[..., None]  # probability of all far keys, (B, H, Tq, 1)
    out = torch.lerp(near.to(fraction.dtype), far.to(fraction.dtype), fraction)
    return out.to(near.dtype), torch.logaddexp(near_lse, far_lse)


def check_inputs(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> None:
    """Raise a ValueError if shapes or dtypes of the arguments of `attend` do not fit together."""
    heads, queries, length = q.shape[1], q.shape[2], k.shape[2]
    shapes = f"shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
    alike = q.ndim == 4 and k.shape[:3] == v.shape[:3] and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    _expect(alike and v.shape[3] <= q.shape[3], "q, k, v", shapes, "(B, H, Tq, δ), (B, G, Tk, δ), (B, G, Tk, δ' <= δ)")
    # torch's fused kernel would divide by 0
    _expect(0 not in (*q.shape, k.shape[1]), "q, k, v", shapes, "at least 1 sequence, head, row and dimension")
    _expect(heads % k.shape[1] == 0, "q, k, v", f"{heads} heads of q", f"a multiple of the {k.shape[1]} of k")
    _expect(queries <= length, "q", f"{queries} queries for {length} keys", "at most as many queries as keys")
    _expect(q.dtype == k.dtype == v.dtype, "q, k, v", f"dtypes {q.dtype}, {k.dtype}, {v.dtype}", "the same dtype")
    for name, x in (("table", spec.table), ("weight", spec.weight)):
        if x is not None:
            fits = x.ndim == 2 and x.shape[0] == heads and x.shape[1] >= length
            _expect(fits, name, f"shape {tuple(x.shape)}", f"(H, >= Tk) = ({heads}, >= {length})")
    if spec.sink is not None:
        shape = tuple(spec.sink.shape)
        fits = shape in (q.shape[1:2], q.shape[:3])
        _expect(fits, "sink", f"shape {shape}", f"(H,) or (B, H, Tq) of q {tuple(q.shape)}")


def _expect(fits: bool, name: str, value: object, expected: str) -> None:
    if not fits:
        raise ValueError(f"{name}: got {value}, expected {expected}")
