"""The decoder every strategy is plugged into: embedding, blocks, norm, head."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kerple.attention.choice import Asked, explained
from kerple.errors import UserError
from kerple.model.attention import tell
from kerple.model.block import Block, Design
from kerple.model.cache import Cache, LayerCache
from kerple.model.head import row_losses, target_losses
from kerple.positions import At, Position, Shape

GRAPHS = 64  # that a compiled network may have: one for each length, window and mode


class Transformer(nn.Module):
    """Decoder that normalises before each part: GPT-2's and the paper's (Chi et al. 2022, arXiv 2205.09921, section 5)
    as it is, and by its options those of Llama, GPT-NeoX and BLOOM.

    Weights are drawn from N(0, init²), those that write into the residual stream from N(0, init² / (2 · layers));
    biases start at 0. Strategies initialise their own parameters.

    Args:
        shape: Width D, heads H and training length.
        layers: Number of blocks.
        vocabulary: Number of token ids V, padding included.
        position: Builds a strategy from the shape; called once if the strategy is shared by all layers, else per layer.
        per_layer: One strategy for each layer or one for all; as the strategy's paper has it if None.
        kv_heads: Heads of keys and values, a divisor of H; H if None.
        hidden: Width inside the network of each position; 4·D if None.
        bias: Whether linear layers and LayerNorms have biases. The head never has one.
        qkv_bias: Whether the layer that makes queries, keys and values has one; as ``bias`` says if None.
        tied: Whether the head reuses the embedding's matrix.
        norm: ``layer`` or ``rms``.
        eps: Of the norms.
        init: Standard deviation of the weights. 0.02 suits widths near 768; a width of 64 learns faster from 1/√64.
        activation: ``gelu``, ``gelu_tanh`` (GPT-2's approximation), ``relu`` or ``silu``.
        gated: Whether a second layer multiplies the activated one: with ``silu``, SwiGLU.
        parallel: Whether attention and network of a block are given the same input, as in GPT-NeoX.
        embedding_norm: Whether the token embeddings are normalised before positions are added, as in BLOOM.
        dropout: Probability of dropping an entry of the embeddings and of each block's two outputs.
        attention: ``auto``, or the way it is to be done (`kerple.attention.choice`).

    Raises:
        UserError: If a number is out of range.
    """

    def __init__(
        self,
        shape: Shape,
        layers: int,
        vocabulary: int,
        position: Callable[[Shape], Position],
        *,
        per_layer: bool | None = None,
        kv_heads: int | None = None,
        hidden: int | None = None,
        bias: bool = True,
        qkv_bias: bool | None = None,
        tied: bool = False,
        norm: Literal["layer", "rms"] = "layer",
        eps: float = 1e-5,
        init: float = 0.02,
        activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu",
        gated: bool = False,
        parallel: bool = False,
        embedding_norm: bool = False,
        dropout: float = 0.0,
        attention: Asked = "auto",
    ) -> None:
        super().__init__()
        for name, number in (("layers", layers), ("vocabulary", vocabulary)):
            if number < 1:
                raise UserError(f"{name}: got {number}, expected a positive number")
        if init <= 0:
            raise UserError(f"init: got {init}, expected a positive standard deviation such as 0.02")
        design = Design(
            shape.heads if kv_heads is None else kv_heads,
            4 * shape.dim if hidden is None else hidden,
            bias,
            qkv_bias,
            norm,
            eps,
            activation,
            gated,
            parallel,
            dropout,
        )
        self.shape = shape
        self.attention = attention
        self.embedding = nn.Embedding(vocabulary, shape.dim)
        self.dropout = nn.Dropout(dropout)
        self.embedding_norm = design.make_norm(shape.dim) if embedding_norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(shape, design) for _ in range(layers))
        self.norm = design.make_norm(shape.dim)
        self.head = nn.Linear(shape.dim, vocabulary, bias=False)
        self.row_losses = row_losses
        self._initialise(init)
        if tied:
            self.head.weight = self.embedding.weight
        self.positions = nn.ModuleList(_strategies(position, replace(shape, layers=layers), per_layer))
        self.places: Callable[[Tensor], Tensor] | None = None
        """What the task says of tokens (B, T), a causal function of them; (B, T) int64. Strategies see `At.places`."""

    def _initialise(self, std: float) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            for into_residual in block.into_residual:
                nn.init.normal_(into_residual.weight, std=std / (2 * len(self.blocks)) ** 0.5)

    def forward(self, tokens: Tensor, offset: int = 0, window: int | None = None, cache: Cache | None = None) -> Tensor:
        """Logits of the next token after each token.

        Args:
            tokens: (B, T) int64.
            offset: Added to every position.
            window: Every layer's attention sees this many keys, the query's own included; None for all before it.
            cache: From `new_cache`: tokens follow those it remembers, and are remembered.

        Returns:
            (B, T, V) in the precision of the head.

        Raises:
            UserError: If the window is not positive, or the strategy cannot reach a position.
        """
        if cache is not None:
            return self.head(Transformer.features(self, tokens, offset, window, cache))
        return self.head(self.features(tokens, offset, window))

    def features(
        self, tokens: Tensor, offset: int = 0, window: int | None = None, cache: Cache | None = None
    ) -> Tensor:
        """What the head is given, (B, T, D); arguments as in `forward`."""
        if window is not None and window < 1:
            raise UserError(f"window: got {window}, expected at least 1 key (the query's own), or none for all keys")
        if cache is not None and cache.window is not None and (window is None or window > cache.window):
            raise UserError(f"window: got {window}, but the cache keeps {cache.window} keys; make a cache for more")
        known = 0 if cache is None else cache.length
        length = known + tokens.shape[1]
        for p in self.positions:
            if p.max_length is not None and offset + length > p.max_length:
                raise UserError(
                    f"position: got {offset + length - 1}, but {type(p).__name__} ends at {p.max_length - 1}: its "
                    f"max_length is {p.max_length}; read less, or with Learned choose beyond: clamp or interpolate"
                )
        read = tokens if cache is None else cache.read(tokens)  # (B, known + T)
        at = At.line(length, offset, tokens.device)
        if self.places is not None:
            at = replace(at, places=self.places(read))
        told = [tell(p, at, read, window, self.attention) for p in self.positions]
        x = self.embedding_norm(self.embedding(tokens))  # (B, T, D)
        x = self.dropout(self.positions[0].embed(x, told[0].at[known:]))
        for i, block in enumerate(self.blocks):
            own = min(i, len(self.positions) - 1)
            x = block(x, self.positions[own], told[own], None if cache is None else cache.layers[i])
        return self.norm(x)

    def losses(self, tokens: Tensor, offset: int = 0, window: int | None = None, last: int | None = None) -> Tensor:
        """Negative log-likelihood of each target in nats, without holding all logits at once.

        Args:
            tokens: (B, T + 1) int64: T inputs and, one further, their T targets.
            offset: Added to every position.
            window: As in `forward`.
            last: Only the last ``last`` targets.

        Returns:
            (B, T), or (B, last), fp32.
        """
        x, targets = self.features(tokens[:, :-1], offset, window), tokens[:, 1:]
        if last is not None:
            x, targets = x[:, -last:], targets[:, -last:]
        losses = target_losses(self.head, x.flatten(0, 1), targets.flatten(), self.row_losses)
        return losses.unflatten(0, targets.shape)  # (B, T)

    def compile(self, **options: Any) -> None:
        """Compile `features` and the loss of a chunk of rows, for each length that training and evaluation ask for.

        Reading with a cache is left as it is: every token would be another length. ``options`` are torch.compile's.
        """
        config = torch._dynamo.config
        # a fit has its training, validation and test lengths, times protocols; past the limit, 8 by default, torch goes
        # on uncompiled and unasked
        config.recompile_limit = max(config.recompile_limit, GRAPHS)
        config.fail_on_recompile_limit_hit = True
        config.optimize_ddp = False  # it cuts the graph into buckets, and knows no FlexAttention
        features = torch.compile(self.features, **{"dynamic": False, **options})

        def explained_features(tokens: Tensor, offset: int = 0, window: int | None = None) -> Tensor:
            with explained(f"the compiled network, T {tokens.shape[1]},", tokens.device, "--model.compile false"):
                return features(tokens, offset, window)

        self.features = explained_features  # type: ignore[method-assign, assignment]
        self.row_losses = torch.compile(row_losses, **options)

    def new_cache(self, window: int | None = None) -> Cache:
        """An empty cache for `forward`, for calls whose window is no larger than this; layers keep what they may see.

        Args:
            window: Keys that every call may see at most; None for all.
        """
        of_layers = [self.positions[min(i, len(self.positions) - 1)].window for i in range(len(self.blocks))]
        limits = [[w for w in (own, window) if w is not None] for own in of_layers]
        return Cache(window, [LayerCache(min(limit, default=None)) for limit in limits])

    def constrain_(self) -> None:
        """Project every strategy's parameters into their range, in place."""
        for position in self.positions:
            position.constrain_()


def _strategies(build: Callable[[Shape], Position], shape: Shape, per_layer: bool | None) -> list[Position]:
    """One strategy for each layer, or one for all, whose parameters are fp32 whatever the precision around them."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.promote_types(usual, torch.float32))  # of bf16-true: bf16
    try:
        first = build(shape)
        each = first.per_layer if per_layer is None else per_layer
        return [first, *(build(replace(shape, layer=i)) for i in range(1, shape.layers) if each)]
    finally:
        torch.set_default_dtype(usual)
