"""`Transformer`: a decoder with any positional strategy."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kerple.base.bf16 import Linear
from kerple.base.errors import UserError, require
from kerple.base.temporary_value import temporary_value
from kerple.model.architecture import Architecture
from kerple.model.block import Block
from kerple.model.cache import Cache, LayerCache
from kerple.model.first_token_scores import new_layer_cache
from kerple.model.generation import generate
from kerple.model.loss import cap_logits, row_losses, target_losses
from kerple.model.network import (
    HasEmbedding,
    HasLengthLimit,
    SupportsAttentionProbabilities,
    SupportsDocuments,
    SupportsGeneration,
)
from kerple.model.self_attention import PositionContext, SelfAttention
from kerple.positions import Position, Shape, StrategyBuilder, TokenPositions
from kerple.positions.visibility import EVERYTHING, Visibility

Element = TypeVar("Element", bound=nn.Module)

if TYPE_CHECKING:

    class Modules(nn.ModuleList, Generic[Element]):
        """`torch.nn.ModuleList` with a type of its elements. It does not exist at run time."""

        def __getitem__(self, index: int) -> Element: ...  # type: ignore[override]

        def __iter__(self) -> Iterator[Element]: ...


GRAPHS = 64  # largest number of graphs of compiled blocks: one per kind of layer, length, window, and mode


class Transformer(
    nn.Module, HasLengthLimit, SupportsDocuments, SupportsGeneration, SupportsAttentionProbabilities, HasEmbedding
):
    """Decoder with any positional strategy (Chi et al. 2022, arXiv 2205.09921, section 5).

    Initial weights of embedding and linear layers have the distribution N(0, init²). Linear layers whose outputs are
    added to the residual stream have N(0, init² / (2 · layers)). Initial biases are 0. Strategies initialise their own
    parameters.

    Args:
        shape: Width D, number of heads H and training length.
        layers: Number of blocks.
        vocabulary: Number of token ids V. It may include unused ids, for example to be a multiple of 128.
        position: Function that builds a strategy from the shape. It is called once if all layers share the strategy.
            It is called once per layer if they do not.
        **options: Options of `kerple.model.architecture.Architecture`.

    Raises:
        UserError: If a number is out of range.
    """

    def __init__(self, shape: Shape, layers: int, vocabulary: int, position: StrategyBuilder, **options: Any) -> None:
        super().__init__()
        require(vocabulary >= 1, "model.vocabulary", vocabulary, "a positive number")
        architecture = Architecture(**options)
        shape = replace(shape, head_width=architecture.head_dim)
        self.shape = shape
        self.training_length: int | None = shape.length
        self.embedding_scale, self.logit_cap = architecture.embedding_scale, architecture.logit_cap
        self.attention = architecture.attention
        # registered first: DDP expects gradients in the reverse order of registration, and those of a shared strategy
        # are complete last
        self.positions = cast("Modules[Position]", nn.ModuleList())
        self.embedding = nn.Embedding(vocabulary, shape.dim)
        self.dropout = nn.Dropout(architecture.dropout)
        self.embedding_norm = architecture.make_norm(shape.dim) if architecture.embedding_norm else nn.Identity()
        self.blocks = cast("Modules[Block]", nn.ModuleList(Block(shape, architecture) for _ in range(layers)))
        self.norm = architecture.make_norm(shape.dim)
        self.head = Linear(shape.dim, vocabulary, bias=False)
        self.run_block, self.row_losses = run_block, row_losses  # `compile` replaces these functions
        self.checkpoint_activations = False
        """Whether training stores only the input of each block, and the backward pass computes the block again.

        Losses and gradients do not change. The memory of activations becomes that of one block and all inputs."""
        self._initialise(architecture.init)
        if architecture.tied:
            self.head.weight = self.embedding.weight
        self.positions.extend(layer_strategies(position, replace(shape, layers=layers), architecture.per_layer))
        self.name = type(self.positions[0]).__name__
        self.bos: int | None = None
        """Token that is added before every input; None for none.

        Lengths and windows exclude it. A window of a test contains it, but not a narrower window of a layer."""
        self.restart_positions = True
        """Whether positions restart at the first token of each document; biases by distance are equal without it."""
        self.places: Callable[[Tensor], Tensor] | None = None
        """Function from tokens to `TokenPositions.places` (B, T), for example the significance of digits; or None."""

    def _initialise(self, std: float) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            for layer in block.residual_layers:
                nn.init.normal_(layer.weight, std=std / (2 * len(self.blocks)) ** 0.5)

    def forward(
        self,
        tokens: Tensor,
        visibility: Visibility = EVERYTHING,
        offset: int = 0,
        cache: Cache | None = None,
        last: int | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of the next token after each token.

        Args:
            tokens: Token ids (B, T) int64.
            visibility: Keys that a query sees in every layer. With a cache, it must be the visibility of the cache.
            offset: Number added to every position.
            cache: Cache from `new_cache`, which contains all earlier tokens. ``tokens`` are added to it.
            last: Number of last tokens whose logits are returned; None for all.
            documents: Document of each token, int64 in the shape of ``tokens``; None for a single document per
                sequence. Consecutive equal numbers are a document. Queries see only keys of their document, and by
                default positions restart (`restart_positions`), so that the logits are those of each document as a
                separate input. An end-of-text token belongs to the document that follows it, whose first token it
                predicts.

        Returns:
            Logits (B, T, V), or (B, last, V), in the dtype of the head's output; with a cap, fp32 or fp64.

        Raises:
            UserError: If the cache has another visibility, or the strategy cannot represent a position. If
                ``documents`` has another shape or dtype, or is combined with `bos` or with first tokens that need a
                cache or other distances.
        """
        with nullcontext() if cache is None else cache.restored_after_errors():
            x = self.features(tokens, visibility, offset, cache, documents)  # (B, T, D)
        return cap_logits(self.head(x if last is None else x[:, -last:]), self.logit_cap)

    def features(
        self,
        tokens: Tensor,
        visibility: Visibility = EVERYTHING,
        offset: int | Tensor = 0,
        cache: Cache | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Return the input of the head, (B, T, D).

        The arguments are those of `forward`, but ``offset`` may also be a tensor with one number per token (see
        `SupportsOffset`).
        """
        if cache is not None:
            expected = f"{cache.visibility}, with which the cache was created; or create another cache"
            require(cache.visibility == visibility, "visibility", visibility, expected)
        if documents is not None:
            check_documents(documents, tokens)
            given = "documents for a network that adds BOS"
            require(self.bos is None, "documents", given, "a network without BOS, or inputs of one document")
        cached = None if cache is None else cache.length
        adds_bos = self.bos is not None and not cached
        if self.bos is not None:
            visibility = visibility.with_bos()
        if adds_bos:
            tokens = F.pad(tokens, (1, 0), value=self.bos)
        length = (cached or 0) + tokens.shape[1]
        positions = TokenPositions.arange(length, 0 if isinstance(offset, Tensor) else offset, tokens.device)
        documents = documents if cache is None else cache.all_documents(documents)
        if documents is not None:
            positions = positions.divided(documents, self.restart_positions)
        self._check_limits(positions, offset)
        all_tokens = tokens if cache is None else cache.append(tokens, documents)  # (B, length)
        if self.places is not None:
            positions = replace(positions, places=self.places(all_tokens))
        shifted = positions  # positions in layers without a window; layers with a window ignore offsets per token
        if isinstance(offset, Tensor):
            shifted = replace(positions, ids=positions.ids + F.pad(offset, (int(adds_bos), 0)), contiguous=False)
        arguments = all_tokens, visibility, self.attention, cached
        contexts = [PositionContext(p, shifted if p.window is None else positions, *arguments) for p in self.positions]
        x = self.embedding(tokens)  # (B, T, D)
        x = self.embedding_norm(x if self.embedding_scale == 1 else x * self.embedding_scale)
        x = self.dropout(self.positions[0].embed(x, contexts[0].queries))
        run = self.run_block if cache is None else run_block  # a compiled block would need a graph for each length
        if self.checkpoint_activations and torch.is_grad_enabled():
            run = partial(checkpoint, run, use_reentrant=False)
        for i, block in enumerate(self.blocks):
            strategy = min(i, len(self.positions) - 1)  # 0 if all layers share a strategy
            x = run(block, x, self.positions[strategy], contexts[strategy], None if cache is None else cache.layers[i])
        return self.norm(x[:, int(adds_bos) :])

    def _check_limits(self, positions: TokenPositions, offset: int | Tensor) -> None:
        """Raise a UserError if a strategy cannot represent one of the positions, to which ``offset`` is added."""
        for p in self.positions:
            if p.max_length is None:
                continue
            lowest = int(torch.as_tensor(offset).min())
            require(lowest >= 0, "offset", lowest, f"0 or more, because {type(p).__name__} has a table of positions")
            restarted = self.restart_positions and positions.first_key is not None
            # with documents, the numbers are read from the device
            length = int(positions.document_rows.max()) + 1 if restarted else len(positions.rows)
            if (end := length + int(torch.as_tensor(offset).max())) > p.max_length:
                given = f"{type(p).__name__} has positions up to {p.max_length - 1}, got {end - 1}"
                advice = "use shorter inputs, or for Learned set model.position.beyond to 'clamp' or 'interpolate'"
                raise UserError(f"model.position: {given}; {advice}")

    def losses(
        self,
        tokens: Tensor,
        last: int | None = None,
        visibility: Visibility = EVERYTHING,
        offset: int | Tensor = 0,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Return the negative log-likelihood of each target in nats, see `kerple.model.loss.target_losses`.

        Args:
            tokens: Token ids (B, T + 1) int64: the first T are inputs, and the last T are their targets.
            last: Number of last targets whose losses are returned; None for all.
            visibility: Keys that a query sees in every layer.
            offset: Number added to every position, or one number per input token, see `SupportsOffset`.
            documents: Document of each token, int64 in the shape of ``tokens``, see `forward`. The number of the last
                token, which is only a target, has no effect.

        Returns:
            Losses (B, T), or (B, last), fp32, or fp64 in an fp64 network.
        """
        if documents is not None:
            check_documents(documents, tokens)
            documents = documents[:, :-1]
        x, targets = self.features(tokens[:, :-1], visibility, offset, documents=documents), tokens[:, 1:]
        if last is not None:
            x, targets = x[:, -last:], targets[:, -last:]
        losses_of_rows = row_losses if x.device.type == "cpu" else self.row_losses
        losses = target_losses(self.head, x.flatten(0, 1), targets.flatten(), losses_of_rows, cap=self.logit_cap)
        return losses.unflatten(0, targets.shape)  # (B, T)

    def compile(self, **options: Any) -> None:
        """Compile the loss and the blocks; the blocks once for each length, window and mode (training or evaluation).

        On a CPU, only the blocks are compiled, because the compiled loss takes longer than the loss in place.

        Blocks with the same kind of strategy share one graph, so that the time of compilation does not depend on the
        number of layers. While the backward pass computes a block, DDP can send the gradients of later blocks to other
        devices. Calls with a cache are not compiled, because each token changes the length.

        Args:
            **options: Options of `torch.compile`.
        """
        config = torch._dynamo.config
        # training, validation and test need several graphs; by default, torch raises no error after 8 graphs, but runs
        # further lengths uncompiled
        config.recompile_limit = max(config.recompile_limit, GRAPHS)
        config.fail_on_recompile_limit_hit = True
        config.optimize_ddp = False  # this optimisation splits graphs, and does not support FlexAttention
        self.run_block = torch.compile(run_block, **{"dynamic": False, **options})
        self.row_losses = torch.compile(row_losses, **options)

    def continued(self, tokens: Tensor, steps: int) -> list[int]:
        return [int(token) for token in generate(self, tokens, steps)]

    @torch.no_grad()
    def visit_attention(
        self,
        tokens: Tensor,
        visit: Callable[[int, Tensor], None],
        visibility: Visibility = EVERYTHING,
        documents: Tensor | None = None,
    ) -> None:
        text = slice(-tokens.shape[1], None)  # without BOS

        def hook(layer: int, attention: SelfAttention, arguments: tuple[Any, ...]) -> None:
            visit(layer, attention.probabilities(*arguments[:3])[:, :, text, text])

        with ExitStack() as contexts:
            for i, block in enumerate(self.blocks):
                contexts.enter_context(block.attention.register_forward_pre_hook(partial(hook, i)))
            contexts.enter_context(temporary_value(self, "run_block", run_block))  # compiled graphs do not call hooks
            self.features(tokens, visibility, documents=documents)

    @property
    def max_length(self) -> int | None:
        limits = [p.max_length - (self.bos is not None) for p in self.positions if p.max_length is not None]
        return min(limits, default=None)

    @property
    def prefix_consistent(self) -> bool:
        """Whether the logits after a token do not depend on later tokens or their number, as a cache requires."""
        return all(p.prefix_consistent for p in self.positions)

    def new_cache(self, visibility: Visibility = EVERYTHING) -> Cache:
        """Create an empty cache for `forward`. Each layer keeps the tokens that later queries may see.

        Args:
            visibility: Keys that a query sees in calls with this cache.
        """
        strategies = [self.positions[min(i, len(self.positions) - 1)] for i in range(len(self.blocks))]
        seen = visibility if self.bos is None else visibility.with_bos()
        return Cache(visibility, [new_layer_cache(strategy, seen) for strategy in strategies])

    def constrain_(self) -> None:
        """Project the parameters of all strategies into their ranges, in place."""
        for position in self.positions:
            position.constrain_()


def check_documents(documents: Tensor, tokens: Tensor) -> None:
    """Raise a UserError if ``documents`` are not int64 in the shape of ``tokens``."""
    valid = documents.shape == tokens.shape and documents.dtype == torch.int64
    given = f"shape {tuple(documents.shape)} {documents.dtype}"
    require(valid, "documents", given, f"one number per token, {tuple(tokens.shape)} torch.int64")


def run_block(
    block: Block, x: Tensor, position: Position, context: PositionContext, cache: LayerCache | None
) -> Tensor:
    """Apply a block, (B, T, D) -> (B, T, D). `Transformer.compile` compiles this function."""
    return block(x, position, context, cache)


def layer_strategies(build: StrategyBuilder, shape: Shape, per_layer: bool | None) -> list[Position]:
    """Build one strategy per layer, or one for all layers, with parameters in fp32 or better."""
    default_dtype = torch.get_default_dtype()  # bf16 if trainer.precision is bf16-true
    torch.set_default_dtype(torch.promote_types(default_dtype, torch.float32))
    try:
        first = build(shape)
        per_layer = first.per_layer if per_layer is None else per_layer
        expected = f"true for {type(first).__name__}, whose layers differ"
        require(per_layer or not first.varies_by_layer, "model.per_layer", "false", expected)
        return [first, *(build(replace(shape, layer=i)) for i in range(1, shape.layers) if per_layer)]
    finally:
        torch.set_default_dtype(default_dtype)
