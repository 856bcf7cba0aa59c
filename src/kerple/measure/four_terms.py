"""`FourTerms`: the attention scores of the first layer as a sum of four terms, for absolute positional encodings.

The terms are word-word, word-position, position-word and position-position (Ke et al. 2021, arXiv 2006.15595, eq. 6).
The first part of a term's name belongs to the query, the second to the key.
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from kerple.data.evaluation_text import Text
from kerple.measure.measure import BlockMeasure
from kerple.measure.result import Result
from kerple.measure.runner import Runner
from kerple.model import Transformer
from kerple.positions import TokenPositions
from kerple.positions.base import HOOKS

TERMS = ("word-word", "word-position", "position-word", "position-position")


@torch.no_grad()
def four_terms(network: Transformer, tokens: Tensor, documents: Tensor | None = None) -> dict[str, Tensor]:
    """Expand the first layer's scores ``(x_m + p_m) W_Q · (x_n + p_n) W_K / √δ`` into the products of their parts.

    m and n are the positions of the query and the key, and δ is the head dimension. x is the embedding of the word,
    scaled if the strategy scales it, and p is the embedding of the position.

    LayerNorm and RMSNorm divide x + p by a number. With this number fixed they are linear, so the expansion is exact.
    The shift of the norm and the biases of W_Q and W_K are neither word nor position. All products with them form a
    fifth term, the rest.

    Args:
        network: A network for which `no_four_terms` returns None.
        tokens: Token ids (B, T) int64.
        documents: Document of each token, (B, T) int64, or None; see `Transformer.forward`.

    Returns:
        The terms of `TERMS` and "rest", each (B, heads, queries, keys) fp32, or fp64 for a network in fp64. No key
        is masked. The sum of the terms is the scores before the softmax. A BOS that the network prepends counts as a
        position, and is left out of the terms.
    """
    text = slice(-tokens.shape[1], None)  # without BOS
    if network.bos is not None:
        tokens = pad(tokens, (1, 0), value=network.bos)
    position, block = network.positions[0], network.blocks[0]
    positions = TokenPositions.arange(tokens.shape[1], device=tokens.device)
    if documents is not None:
        positions = positions.divided(documents, network.restart_positions)
    if network.places is not None:
        positions = replace(positions, places=network.places(tokens))
    positions = position.remap_positions(positions, tokens)
    attention = block.attention
    norm: Any = block.attention_norm  # LayerNorm or RMSNorm
    dtype = torch.promote_types(torch.float32, attention.qkv.weight.dtype)
    with torch.autocast(tokens.device.type, enabled=False):
        words = network.embedding_norm(network.embedding(tokens) * network.embedding_scale).to(dtype)  # (B, T, D)
        embedded = position.embed(words, positions)
        vectors = position.embed(torch.zeros_like(words), positions)  # not ``embedded - words``: words may be scaled

        def centred(x: Tensor) -> Tensor:
            """Subtract the mean over the last dimension if the norm does. RMSNorm does not."""
            return x - x.mean(-1, keepdim=True) if isinstance(norm, nn.LayerNorm) else x

        gain = norm.weight.to(dtype) / (centred(embedded).square().mean(-1, keepdim=True) + norm.eps).sqrt()
        parts = {"word": centred(embedded - vectors) * gain, "position": centred(vectors) * gain}
        shift = getattr(norm, "bias", None)  # None for RMSNorm
        parts["whole"] = parts["word"] + parts["position"] + (0 if shift is None else shift.to(dtype))
        weights = attention.qkv.weight.to(dtype).split(attention.widths)
        biases = (None,) * 3 if attention.qkv.bias is None else attention.qkv.bias.to(dtype).split(attention.widths)

        def heads(name: str, i: int) -> Tensor:
            """Return queries (i = 0) or keys (i = 1) of a part, (B, heads, T, δ). Shared keys are repeated."""
            x = linear(parts[name], weights[i], biases[i] if name == "whole" else None)
            x = x.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)  # (B, heads or key heads, T, δ)
            return x.repeat_interleave(attention.heads // x.shape[1], 1)

        q, k = ({name: heads(name, i) for name in parts} for i in (0, 1))
        scores = {f"{a}-{b}": q[a] @ k[b].mT * attention.head_dim**-0.5 for a, b in (term.split("-") for term in TERMS)}
        scores["rest"] = q["whole"] @ k["whole"].mT * attention.head_dim**-0.5 - sum(scores.values())
        return {name: score[..., text, text] for name, score in scores.items()}


def no_four_terms(network: Transformer) -> str | None:
    """Return the reason why the first layer's scores are not the sum of four terms, or None if they are."""
    position = network.positions[0]
    name = type(position).__name__
    hooks = {hook for hook in HOOKS if position.uses(hook)} - {"remap_positions"}
    if "embed" not in hooks:
        return f"{name} adds nothing to the embeddings, so there are no four terms"
    if more := ", ".join(sorted(hooks - {"embed"})):
        return f"{name} also overrides {more}, so its scores have more than four terms"
    if isinstance(network.blocks[0].attention_norm, nn.Identity):
        return "norm_placement is post, so the scores are those of the embeddings without a norm"
    if not isinstance(network.blocks[0].attention.q_norm, nn.Identity):
        return "qk_norm normalises queries and keys, so their scores are not a sum of four terms"
    return None


def keys_of_document(tokens: Tensor, documents: Tensor | None = None) -> Tensor:
    """Return which keys each query sees, (B, 1, T, T) bool, for ``tokens`` and ``documents`` of `four_terms`."""
    documents = torch.zeros_like(tokens) if documents is None else documents
    return (documents[:, None, :, None] == documents[:, None, None, :]).tril()


def spread(term: Tensor, visible: Tensor) -> Tensor:
    """Return the standard deviation of a term over the visible keys of a query, pooled over queries, (heads,) fp64.

    The mean of each query is subtracted first, because a constant for a query does not change the softmax.

    Args:
        term: The term, (B, heads, queries, keys).
        visible: Which keys each query sees, (B, 1, queries, keys) bool.
    """
    values = term.double().masked_fill(~visible, 0)
    centred = (values - (values.sum(-1) / visible.sum(-1))[..., None]).masked_fill(~visible, 0)
    return (centred.square().sum((0, 2, 3)) / visible.sum()).sqrt()


@dataclass
class FourTerms(BlockMeasure):
    """Splits the first layer's scores into word-word, word-position, position-word and position-position terms.

    The result has a figure of the four matrices, as means over heads and blocks, and ``four_terms.csv`` (head, term,
    standard deviation). The standard deviation of a term over the keys that a query sees measures its influence on the
    softmax. The term ``rest`` has the products with biases and with the shift of the norm. With document masks, the
    mean for a pair is that of the blocks in which the query sees the key.

    The measurement is skipped if the strategy does not add to the embeddings, if it also changes attention in another
    way, or if the model has ``qk_norm``.

    Args:
        length: Number of tokens in a block, at most 512; None for the training length.
        blocks: Number of blocks.
    """

    name: ClassVar[str] = "four_terms"
    needs: ClassVar[tuple[type, ...]] = (Transformer,)
    max_length: ClassVar[int | None] = 512  # there are several tensors of heads × tokens² scores

    def skip_reason(self, network: Any) -> str | None:
        return no_four_terms(network) or super().skip_reason(network)

    def measure(self, network: Any, text: Text, runner: Runner) -> Result:
        names = (*TERMS, "rest")
        blocks = self.text_blocks(network, text)
        length, heads = self.targets(network), network.shape.heads
        variance = torch.zeros(len(names), heads, dtype=torch.float64, device=runner.device)
        total = torch.zeros(len(TERMS), length, length, dtype=torch.float64, device=runner.device)
        count = torch.zeros(length, length, dtype=torch.float64, device=runner.device)
        for i, tokens in runner.blocks(blocks):
            documents = {name: x[:, :-1] for name, x in blocks.document_options(i, runner.device).items()}
            terms = four_terms(network, tokens[:, :-1], **documents)
            visible = keys_of_document(tokens[:, :-1], **documents)
            variance += torch.stack([spread(terms[name], visible).square() for name in names]) / len(blocks)
            total += torch.stack([terms[name][0].double().mean(0) for name in TERMS]) * visible[0, 0]
            count += visible[0, 0]
        variance, mean = runner.sum(variance), runner.sum(total) / runner.sum(count)  # NaN for keys that are not seen
        deviations = zip(product(range(heads), names), variance.sqrt().T.flatten().tolist(), strict=True)
        rows = [{"head": head, "term": name, "standard_deviation": value} for (head, name), value in deviations]
        title = f"{network.name}, first layer: terms of the scaled scores, mean of {len(blocks)} blocks"
        return Result(self.name, {self.name: rows}, {self.name: _figure(mean, variance.mean(1).sqrt(), title)})


def _figure(matrices: Tensor, deviations: Tensor, title: str) -> Figure:
    """Draw the four terms.

    Args:
        matrices: Mean scores of each term, (4, queries, keys); NaN is white.
        deviations: Standard deviation of each term and of the rest, (5,), for the titles; the last is ignored.
        title: Title of the figure.
    """
    figure = Figure(figsize=(8.4, 7.6), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, sharey=True).flat
    for axes, matrix, name, deviation in zip(panels, matrices, TERMS, deviations, strict=False):
        limit = float(matrix.abs().nan_to_num(0).quantile(0.99)) or 1.0  # limits the effect of outliers on the colours
        image = axes.imshow(matrix.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
        figure.colorbar(image, ax=axes, shrink=0.85, label="score (nats)")
        axes.set_title(f"{name}: standard deviation {float(deviation):.2g}", fontsize=10)
        axes.set(xlabel="key position n", ylabel="query position m")
    figure.suptitle(title)
    return figure
