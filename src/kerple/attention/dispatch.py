"""`attend`: checks its arguments, selects the implementation that suits them and the device, and calls it."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kerple.attention.backend import TINY, AttentionOption, select
from kerple.attention.blocks import attend_blocks
from kerple.attention.cpu import table_attention
from kerple.attention.reference import attend_reference
from kerple.attention.spec import UNMODIFIED, AttentionSpec, for_query_heads, sink_of_queries


def attend(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec = UNMODIFIED, option: AttentionOption = "auto"
) -> Tensor:
    """Causal attention, softmax(q·k/√δ + what the strategy adds)·v.

    Distances are those of row indices: query row m, key row n, d = m - n. The queries are the last Tq of the Tk rows:
    all of them in training, the newest ones when keys come from a cache. Scores, softmax and the table's gradient are
    fp32 (fp64 for fp64 input); gradients are the same bits in every run, but on CUDA where functions of a strategy
    gather or scatter. Under autocast q, k, v are cast to its dtype. From bf16 input no backend rounds q·k before the
    softmax.

    Args:
        q: (B, H, Tq, δ), Tq <= Tk. Any strides.
        k: (B, G, Tk, δ) in the dtype of ``q``; head h of the queries meets head h // (H / G).
        v: (B, G, Tk, δ'), δ' <= δ.
        spec: What the strategy changes.
        option: ``auto``, or the implementation to take; see `kerple.attention.backend.select`.

    Returns:
        (B, H, Tq, δ') in the dtype of ``q`` (of autocast, where that is on).

    Raises:
        ValueError: If shapes or dtypes do not fit together.
    """
    check(q, k, v, spec)
    device = q.device.type
    if torch.is_autocast_enabled(device) and q.dtype != torch.float64:
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    queries, length, width = q.shape[2], k.shape[2], v.shape[3]
    scale = q.shape[3] ** -0.5 if spec.scale is None else spec.scale
    window = None if spec.window is None or spec.window >= length else spec.window
    explicit = (spec.weight, spec.more_keys, spec.modify_scores, spec.add_to_output)
    backend = select(
        option,
        q.device,
        q.dtype,
        (q.shape[3], width),
        "all" if queries == length else "one" if queries == 1 else "last",
        length <= TINY,
        # a sink needs the log-sum-exp, which torch's own attention does not return
        spec.table is not None or spec.sink is not None,
        window is not None,
        any(x is not None for x in explicit) or spec.first > 0,
    )
    if backend in ("sdpa", "tiles") and width < q.shape[3]:  # torch's kernels want one width
        v = F.pad(v, (0, q.shape[3] - width))
    if backend == "sdpa":
        grouped = k.shape[1] < q.shape[1]
        if grouped and device == "cuda" and q.dtype == torch.float32:
            # torch's kernels for groups are for half precision; for fp32 it would write T × T scores down
            k, v = for_query_heads(q, k, v)
            grouped = False
        out = F.scaled_dot_product_attention(q, k, v, is_causal=queries > 1, scale=scale, enable_gqa=grouped)
        return out[..., :width]
    dtype, precise = q.dtype, torch.promote_types(q.dtype, torch.float32)
    if length <= TINY or backend == "reference":
        q, k, v = (x.to(precise) for x in (q, k, v))
    given = (spec.table, spec.weight, spec.sink)
    table, weight, sink = (None if x is None else x.to(precise) for x in given)
    spec = replace(spec, scale=scale, window=window, table=table, weight=weight, sink=sink)
    if backend == "flex":
        from kerple.attention.cuda import attend_flex  # not on every machine, and slow to import

        out, lse = attend_flex(q, k, v, table, window, scale, sink is not None)
        out = with_sink(out, lse, sink)
    elif backend == "tiles":
        k, v = for_query_heads(q, k, v)
        if table is None:
            table = q.new_zeros(q.shape[1], length, dtype=precise)
        out, lse = table_attention(q, k, v, table, window, table.requires_grad, scale)
        out = with_sink(out, lse, sink)
    elif backend == "blocks":
        out = attend_blocks(q, k, v, spec)
    else:
        with torch.autocast(device, enabled=False):
            out = attend_reference(q, k, v, spec)
    return out[..., :width].to(dtype)


def with_sink(out: Tensor, lse: Tensor, sink: Tensor | None) -> Tensor:
    """Multiply an output (B, H, Tq, δ) by the probability that a sink leaves to the keys; lse is (B, H, Tq)."""
    if sink is None:
        return out
    return (out * torch.sigmoid(lse - sink_of_queries(sink))[..., None]).to(out.dtype)  # (B, H, Tq, δ)


def check(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> None:
    """Check that shapes, dtypes and modes fit together, as `attend` says."""
    heads, queries, length = q.shape[1], q.shape[2], k.shape[2]
    shapes = f"shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
    alike = q.ndim == 4 and k.shape[:3] == v.shape[:3] and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    _expect(alike and v.shape[3] <= q.shape[3], "q, k, v", shapes, "(B, H, Tq, δ), (B, G, Tk, δ), (B, G, Tk, δ' <= δ)")
    # torch's fused kernel would divide by 0
    _expect(0 not in (*q.shape, k.shape[1]), "q, k, v", shapes, "at least 1 sequence, head, row and dimension")
    _expect(heads % k.shape[1] == 0, "q, k, v", f"{heads} heads of q", f"a multiple of the {k.shape[1]} of k")
    _expect(queries <= length, "q", f"{queries} queries for {length} keys", "no more than keys: the last rows")
    _expect(q.dtype == k.dtype == v.dtype, "q, k, v", f"dtypes {q.dtype}, {k.dtype}, {v.dtype}", "one; cast them alike")
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
