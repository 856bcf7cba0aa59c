"""`Architecture`: the options of a decoder, for Python, the command line and checkpoints."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import nn

from kerple.attention import AttentionOption
from kerple.base.errors import UserError

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU("tanh"),
    "relu": nn.ReLU,
    "silu": nn.SiLU,
}


@dataclass(frozen=True)
class Architecture:
    """Options of a decoder. The defaults are those of GPT-2; other values give Llama, GPT-NeoX or BLOOM.

    Args:
        head_dim: Head dimension; null for D / H.
        kv_heads: Number of heads of keys and values, a divisor of H; null for H.
        per_layer: Whether each layer has its own instance of the positional strategy; null for the default of the
            strategy.
        hidden: Width of the hidden layer in each block's feed-forward network; null for 4·D.
        bias: Whether linear layers and LayerNorms have biases. The head has none.
        qkv_bias: Whether the projection of queries, keys and values has a bias; null for the value of ``bias``.
        qk_norm: Whether queries and keys of each head are normalised by an RMSNorm before the strategy is applied. It
            bounds the scores (Henry et al. 2020, arXiv 2010.04245; Dehghani et al. 2023, arXiv 2302.05442, section 2).
            The gain has one number per dimension and is shared by the heads. ``all`` normalises all heads together, and
            the gain has one number per head and dimension, as in OLMo 2 (arXiv 2501.00656).
        tied: Whether input and output embeddings share one matrix.
        norm: Normalisation, ``layer`` or ``rms``.
        norm_placement: ``pre`` normalises the inputs of attention and feed-forward network. ``post`` normalises their
            outputs before they are added to the residual stream (OLMo 2). ``both`` does both (Gemma 3).
        eps: Epsilon of the norms.
        init: Standard deviation of the initial weights. 0.02 suits widths near 768; a width of 64 trains faster with
            1/√64.
        activation: ``gelu``, ``gelu_tanh`` (GPT-2's approximation), ``relu`` or ``silu``.
        gated: Whether a second layer of the feed-forward network multiplies the activations, as in SwiGLU.
        parallel: Whether attention and feed-forward network of a block have the same input, as in GPT-NeoX.
        embedding_norm: Whether the token embeddings are normalised before positions are added, as in BLOOM.
        embedding_scale: Factor of the token embeddings, √D in Gemma.
        logit_cap: Logits x become cap · tanh(x / cap) (Gemma 2, arXiv 2408.00118, section 2); null for no cap.
        dropout: Dropout probability of the embeddings and of the outputs of attention and feed-forward network.
        attention: Implementation of attention. ``auto`` selects the fastest one that supports the strategy, and logs
            it. ``fused`` is an error if this would be attention in blocks of queries. ``blocks`` and ``reference``
            force these implementations (`kerple.attention.backend`).

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
        if self.hidden is not None and self.hidden < 1:
            raise UserError(f"hidden: got {self.hidden}, expected a positive width")
        if self.init <= 0:
            raise UserError(f"init: got {self.init}, expected a positive standard deviation such as 0.02")
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout: got {self.dropout}, expected a probability in [0, 1)")
        places = ("pre", "post", "both")
        for name, accepted in (("activation", ACTIVATIONS), ("norm", ("layer", "rms")), ("norm_placement", places)):
            if getattr(self, name) not in accepted:
                raise UserError(f"{name}: got {getattr(self, name)!r}, expected one of {', '.join(accepted)}")

    def make_norm(self, dim: int) -> nn.Module:
        """Return a LayerNorm or RMSNorm (Zhang & Sennrich 2019, arXiv 1910.07467) of width ``dim``."""
        return nn.RMSNorm(dim, self.eps) if self.norm == "rms" else nn.LayerNorm(dim, self.eps, bias=self.bias)

    def make_block_norm(self, dim: int, place: Literal["pre", "post"]) -> nn.Module:
        """Return the norm before (``pre``) or after (``post``) a sublayer, or the identity if there is none."""
        return self.make_norm(dim) if self.norm_placement in (place, "both") else nn.Identity()
