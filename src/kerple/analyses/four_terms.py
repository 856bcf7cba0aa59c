"""The four terms of a score under an absolute encoding: word-word, word-position, position-word, position-position.

The callback `FourTerms` reports them.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from kerple.base.errors import UserError
from kerple.evaluation.results import strategy
from kerple.model import Transformer
from kerple.positions import TokenPositions
from kerple.positions.base import HOOKS

TERMS = ("word-word", "word-position", "position-word", "position-position")


@torch.no_grad()
def four_terms(network: Transformer, tokens: Tensor) -> dict[str, Tensor]:
    """Expand the first layer's scores ``(x_m + p_m) W_Q · (x_n + p_n) W_K / √δ`` into the products of their parts.

    x is the word embedding, scaled if the strategy does so, and p the position's (Ke et al. 2021, arXiv 2006.15595,
    equation 6). The expansion is exact: given the divisor σ of x + p, LayerNorm and RMSNorm are linear.
    The contributions of the norm's shift and of the biases of W_Q and W_K belong to neither part and are a fifth term.

    Args:
        network: A model whose strategy adds something to the embeddings and does not change the scores.
        tokens: (B, T) int64.

    Returns:
        The terms named in `TERMS` and "rest", each (B, H, queries, keys) fp32 (fp64 in an fp64 network). Future keys
        are not masked. The terms add up to the scores before the softmax.

    Raises:
        UserError: If `no_four_terms` has a reason.
    """
    if why := no_four_terms(network):
        raise UserError(f"position: {why}; use Learned or Sinusoidal, without model.qk_norm")
    position = network.positions[0]
    block, at = network.blocks[0], TokenPositions.line(tokens.shape[1], device=tokens.device)
    attention = block.attention
    norm: Any = block.attention_norm  # LayerNorm or RMSNorm
    with torch.autocast(tokens.device.type, enabled=False):
        wide = torch.promote_types(torch.float32, attention.qkv.weight.dtype)
        words = network.embedding_norm(network.embedding(tokens)).to(wide)  # (B, T, D)
        both = position.embed(words, at)
        alone = position.embed(torch.zeros_like(words), at)  # the difference, because the strategy may scale the words
        centred = _centred if isinstance(norm, nn.LayerNorm) else lambda x: x  # RMSNorm takes no mean away
        gain = norm.weight.to(wide) / (centred(both).square().mean(-1, keepdim=True) + norm.eps).sqrt()
        parts = {"word": centred(both - alone) * gain, "position": centred(alone) * gain}
        bias = getattr(norm, "bias", None)  # RMSNorm has none
        shift = 0 if bias is None else bias.to(wide)
        w_q, w_k, _ = attention.qkv.weight.to(wide).split(attention.widths)
        b_q, b_k = (
            (None, None) if attention.qkv.bias is None else attention.qkv.bias.to(wide).split(attention.widths)[:2]
        )

        def heads(x: Tensor) -> Tensor:
            x = x.unflatten(-1, (-1, both.shape[-1] // attention.heads)).transpose(1, 2)  # (B, H or G, T, δ)
            return x.repeat_interleave(attention.heads // x.shape[1], 1)  # (B, H, T, δ)

        scale = (both.shape[-1] // attention.heads) ** -0.5
        q = {name: heads(linear(part, w_q)) for name, part in parts.items()}
        k = {name: heads(linear(part, w_k)) for name, part in parts.items()}
        terms = {f"{a}-{b}": q[a] @ k[b].transpose(-1, -2) * scale for a in q for b in k}
        normed = parts["word"] + parts["position"] + shift
        whole = heads(linear(normed, w_q, b_q)) @ heads(linear(normed, w_k, b_k)).transpose(-1, -2) * scale
        return terms | {"rest": whole - sum(terms.values())}


def no_four_terms(network: Transformer) -> str | None:
    """Why the first layer's scores are not the sum that `four_terms` returns, or None if they are."""
    position = network.positions[0]
    hooks = {hook for hook in HOOKS if position.uses(hook)} - {"remap_positions"}
    if "embed" not in hooks:
        return f"{strategy(network)} adds nothing to the embeddings, so there are no four terms"
    if more := ", ".join(sorted(hooks - {"embed"})):
        return f"{strategy(network)} also has {more}, so its scores are more than four terms"
    if not isinstance(network.blocks[0].attention.q_norm, nn.Identity):
        return "qk_norm normalises queries and keys, so their scores are no sum of four terms"
    return None


def spread(term: Tensor) -> Tensor:
    """Standard deviation of a term (B, H, T, T) over the keys that each query sees, pooled over queries; (H,) fp64.

    The mean of each query is subtracted first, because a constant per query does not change the softmax.
    """
    seen = torch.ones(term.shape[-2:], dtype=torch.bool, device=term.device).tril()
    values = term.double().masked_fill(~seen, 0)
    centred = (values - (values.sum(-1) / seen.sum(-1))[..., None]).masked_fill(~seen, 0)
    return (centred.square().sum((0, 2, 3)) / (len(term) * seen.sum())).sqrt()


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)
