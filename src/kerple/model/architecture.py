"""`Architecture`: the options of a decoder, for Python, the command line and checkpoints."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

from kerple.attention import AttentionOption
from kerple.base.errors import require

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU("tanh"),
    "relu": nn.ReLU,
    "silu": nn.SiLU,
}


@dataclass(frozen=True)
class Architecture:
    """Options of a decoder of width D with H query heads.

    The defaults give the blocks of GPT-2, but with exact GELU, without dropout, and with separate matrices of embedding
    and output head. Other values give Llama, GPT-NeoX or BLOOM.

    Args:
        head_dim: Head dimension; null for D / H.
        kv_heads: Number of heads of keys and values, a divisor of H; null for H.
        per_layer: Whether each layer has its own instance of the positional strategy; null for the default of the
            strategy.
        hidden: Width of the hidden layer in each block's feed-forward network; null for 4·D.
        bias: Whether linear layers and LayerNorms have biases. The output head never has one.
        qkv_bias: Whether the projection to queries, keys and values has a bias; null for the value of ``bias``.
        qk_norm: Whether an RMSNorm normalises queries and keys of each head before the strategy is applied. This bounds
            the scores (Henry et al. 2020, arXiv 2010.04245; Dehghani et al. 2023, arXiv 2302.05442, section 2). The
            heads share one gain per dimension. ``all`` normalises all heads together, with one gain per head and
            dimension, as in OLMo 2 (arXiv 2501.00656).
        tied: Whether embedding and output head share one matrix.
        norm: ``layer`` for LayerNorm, ``rms`` for RMSNorm.
        norm_placement: ``pre`` normalises the inputs of attention and feed-forward network. ``post`` normalises their
            outputs before they are added to the residual stream (OLMo 2). ``both`` does both (Gemma 3).
        eps: Epsilon of all norms.
        init: Standard deviation of the initial weights. 0.02 suits widths near 768. A width of 64 trains faster with
            1/√64.
        activation: ``gelu``, ``gelu_tanh`` (GPT-2's approximation), ``relu`` or ``silu``.
        gated: Whether the activations in the feed-forward network are multiplied by a second linear layer of its input,
            as in SwiGLU.
        parallel: Whether attention and feed-forward network of a block have the same input, as in GPT-NeoX.
        embedding_norm: Whether the token embeddings are normalised before positions are added, as in BLOOM.
        embedding_scale: Factor of the token embeddings; √D in Gemma.
        logit_cap: Positive number c; logits x become c · tanh(x / c) (Gemma 2, arXiv 2408.00118, section 2). Null for
            unchanged logits.
        dropout: Dropout probability of the embeddings and of the outputs of attention and feed-forward network.
        attention: Implementation of attention. ``auto`` selects the fastest one that supports the strategy, and logs
            the choice. ``fused`` does the same, but raises an error if the choice is ``blocks`` (exceptions: calls with
            few keys or with fewer queries than keys). ``blocks`` computes the scores of one block of queries at a time,
            and ``reference`` those of all queries at once.

    Raises:
        UserError: If an option is unknown or out of range.
    """

    head_dim: int | None = None
    kv_heads: int | None = None
    per_layer: bool | None = None
    hidden: int | None = None
    bias: bool = True
    qkv_bias: bool | None = None
    qk_norm: bool | Literal["all"] = False
    tied: bool = False
    norm: Literal["layer", "rms"] = "layer"
    norm_placement: Literal["pre", "post", "both"] = "pre"
    eps: float = 1e-5
    init: float = 0.02
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu"
    gated: bool = False
    parallel: bool = False
    embedding_norm: bool = False
    embedding_scale: float = 1.0
    logit_cap: float | None = None
    dropout: float = 0.0
    attention: AttentionOption = "auto"

    def __post_init__(self) -> None:
        for name, valid, expected in (
            ("head_dim", self.head_dim is None or self.head_dim >= 1, "a positive width"),
            ("hidden", self.hidden is None or self.hidden >= 1, "a positive width"),
            ("init", self.init > 0, "a positive standard deviation such as 0.02"),
            ("logit_cap", self.logit_cap is None or self.logit_cap > 0, "a positive number, or null for no cap"),
            ("dropout", 0 <= self.dropout < 1, "a probability in [0, 1)"),
            ("activation", self.activation in ACTIVATIONS, f"one of {', '.join(ACTIVATIONS)}"),
            ("norm", self.norm in ("layer", "rms"), "layer or rms"),
            ("norm_placement", self.norm_placement in ("pre", "post", "both"), "pre, post or both"),
            ("qk_norm", self.qk_norm in (False, True, "all"), "true, false or all"),
            ("attention", self.attention in get_args(AttentionOption), "auto, fused, blocks or reference"),
        ):
            require(valid, f"model.{name}", getattr(self, name), expected)

    def make_norm(self, dim: int) -> nn.Module:
        """Return a LayerNorm or RMSNorm (Zhang & Sennrich 2019, arXiv 1910.07467) of width ``dim``."""
        return nn.RMSNorm(dim, self.eps) if self.norm == "rms" else nn.LayerNorm(dim, self.eps, bias=self.bias)

    def make_block_norm(self, dim: int, place: Literal["pre", "post"]) -> nn.Module:
        """Return the norm before (``pre``) or after (``post``) attention and feed-forward network.

        The norm is the identity if ``norm_placement`` has no norm there.
        """
        return self.make_norm(dim) if self.norm_placement in (place, "both") else nn.Identity()
