"""Evaluation protocols: ways to read a block of tokens and score its targets; and the sums of the losses.

Notation: B blocks, N targets in a block (N + 1 tokens), L evaluation length. Target t is token t + 1 of the block,
t = 0..N - 1. Every protocol except ``sliding`` cuts a block into segments of L targets, see `full`. Every protocol
except ``last`` scores the same targets at every length. Between lengths only the context of these targets differs.

Losses are negative log-likelihoods in nats, fp32 or fp64, in the order of the targets. A *window* limits the attention
mask (`windowed`). A *stride* is the number of tokens by which a context moves (`sliding`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from kerple.measure.results_table import Row
from kerple.model.network import Network
from kerple.positions.visibility import EVERYTHING, Visibility

if TYPE_CHECKING:
    from kerple.measure.loss_metrics import TokenLoss  # imports torchmetrics, which takes seconds

ProtocolName = Literal["full", "windowed", "keep_first", "sliding", "last", "per_position"]
TOKENS_PER_FORWARD = 16_384
"""Largest number of input tokens in a forward pass with more than one segment."""


def full(network: Network, tokens: Tensor, length: int, documents: Tensor | None = None) -> Tensor:
    """Score every target in non-overlapping segments of ``length``, with full attention.

    This is the protocol of the KERPLE paper (Chi et al. 2022, section 5).

    Args:
        network: The model.
        tokens: Blocks of text, (B, N+1) int64.
        length: Targets in a segment, 1..N. If it does not divide N, the last segment is shorter.
        documents: Document of each token, (B, N+1) int64, for a `kerple.model.network.SupportsDocuments`; None if each
            segment is one document.

    Returns:
        (B, N) losses in nats.
    """
    return windowed(network, tokens, length, EVERYTHING, documents)


def windowed(
    network: Network, tokens: Tensor, length: int, visibility: Visibility, documents: Tensor | None = None
) -> Tensor:
    """Score the segments of `full` with attention limited in every layer to the keys of ``visibility``.

    The difference from `full` is the gain from tokens outside the window. However, some heads attend to the first
    tokens if no other key is relevant (Xiao et al. 2024). A window that hides these tokens can raise the loss even if
    distant text is not used. To measure the gain from distant text, let ``visibility`` include the first four tokens.

    Args:
        network: The model. It must be a `kerple.model.network.SupportsWindows`, unless every key is visible.
        tokens: Blocks of text, (B, N+1) int64.
        length: Targets in a segment, 1..N. If it does not divide N, the last segment is shorter.
        visibility: The keys that a query sees.
        documents: Document of each token, see `full`.

    Returns:
        (B, N) losses in nats.
    """
    targets = tokens.shape[1] - 1
    assert 1 <= length <= targets
    whole = targets // length * length  # targets in segments of the full length
    losses = partial(_losses, network, tokens, documents, visibility=visibility)
    parts = [losses(lambda x: x[:, : whole + 1].unfold(1, length + 1, length))]  # segments (B, S, L+1), a view
    if whole < targets:
        parts.append(losses(lambda x: x[:, None, whole:]))
    return torch.cat(parts, dim=1)  # (B, N)


def sliding(
    network: Network, tokens: Tensor, length: int, *, stride: int, skip: int = 0, documents: Tensor | None = None
) -> Tensor:
    """Score each target once, in a context of ``length`` tokens that moves by ``stride`` tokens in each step.

    Each step is a separate input, in which positions start at 0. Each step scores only targets that no earlier step has
    scored, and none of the first ``skip`` targets. With ``stride = length``, no ``skip``, and a length that divides N,
    the losses are those of `full`. Source: Press et al. 2022, appendix B.

    Args:
        network: The model.
        tokens: Blocks of text, (B, N+1) int64.
        length: Number of tokens of context, 1..N.
        stride: Number of new targets in each step, 1..length.
        skip: Number of targets at the start of a block that are only context, 0..N-1. If it is at least ``length -
            stride``, every scored target has more than ``length - stride`` tokens of context.
        documents: Document of each token, see `full`.

    Returns:
        (B, N - skip) losses in nats.
    """
    targets = tokens.shape[1] - 1
    assert 1 <= stride <= length <= targets
    assert 0 <= skip < targets
    end = max(length, min(skip + stride, targets))  # number of targets up to the end of the first context
    losses = partial(_losses, network, tokens, documents)
    parts = [losses(lambda x: x[:, None, end - length : end + 1], last=end - skip)]
    steps, rest = divmod(targets - end, stride)
    if steps:
        moved = slice(end + stride - length, end + steps * stride + 1)
        parts.append(losses(lambda x: x[:, moved].unfold(1, length + 1, stride), last=stride))
    if rest:
        parts.append(losses(lambda x: x[:, None, targets - length :], last=rest))
    return torch.cat(parts, dim=1)  # (B, N - skip)


@dataclass(frozen=True)
class Protocol:
    """A protocol with its options.

    Args:
        name: One of full, windowed, keep_first, sliding, last, per_position. ``per_position`` has the losses of `full`,
            but `ProtocolLosses` sums them by position instead of by block.
        visibility: The keys that a query sees; limited only in ``windowed`` and ``keep_first``.
        stride: Number of new targets in each step of ``sliding``.
        skip: Number of targets at the start of a block that ``sliding`` does not score.
        k: Number of targets at the end of a segment that ``last`` scores.
    """

    name: ProtocolName
    visibility: Visibility = EVERYTHING
    stride: int | None = None
    skip: int = 0
    k: int | None = None

    @property
    def label(self) -> str:
        """Name of the protocol with the value of one option, such as full, windowed512, keep_first4 or last128.

        `Visibility.distances` is appended unless it is ``true``: keep_first4_capped, keep_first4_cache.
        """
        distances = "" if self.visibility.distances == "true" else f"_{self.visibility.distances}"
        option = self.visibility.first_keys or self.visibility.window or self.stride or self.k or ""
        return f"{self.name}{option}{distances}"

    def part_of_full(self, length: int) -> bool:
        """Return whether the losses at ``length``, which divides N, are some or all of the losses of `full`."""
        if self.visibility.window is not None:
            return self.visibility.window >= length
        if self.stride is not None:
            return self.stride == length and self.skip % length == 0
        return True

    def __call__(
        self,
        network: Network,
        tokens: Tensor,
        length: int,
        full_losses: Callable[[int], Tensor] | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Return the losses in nats, (B, n), of the n targets of `scored_targets`.

        Args:
            network: The model.
            tokens: Blocks of text, (B, N+1) int64.
            length: Evaluation length L in tokens.
            full_losses: Function that returns the losses of `full` at a length, (B, N), and may store them; None to
                compute them.
            documents: Document of each token, see `full`.
        """
        if self.part_of_full(length):
            losses = full(network, tokens, length, documents) if full_losses is None else full_losses(length)
            return losses[:, self.scored_targets(length, losses.shape[1])]
        if self.stride is None:
            return windowed(network, tokens, length, self.visibility, documents)
        return sliding(network, tokens, length, stride=self.stride, skip=self.skip, documents=documents)

    def scored_targets(self, length: int, block_length: int) -> Tensor:
        """Return the indices of the scored targets in a block of ``block_length`` targets, (n,) int64, ascending."""
        targets = torch.arange(self.skip, block_length)
        if self.k is None:  # every protocol except last
            return targets
        return targets[: block_length // length * length].unflatten(0, (-1, length))[:, -self.k :].flatten()


def _losses(
    network: Any,
    tokens: Tensor,
    documents: Tensor | None,
    cut: Callable[[Tensor], Tensor],
    last: int | None = None,
    visibility: Visibility = EVERYTHING,
) -> Tensor:
    """Return the losses of the targets of segments.

    Args:
        network: The model.
        tokens: Blocks of text, (B, N+1) int64.
        documents: Document of each token, or None.
        cut: Function that returns the segments of blocks, (B, S, L+1).
        last: Number of targets at the end of each segment that are scored; None for all L.
        visibility: The keys that a query sees.

    Returns:
        (B, S·L) losses in nats, or (B, S·last).
    """
    rows = cut(tokens).flatten(0, 1)  # (B·S, L+1)
    batches = rows.split(max(1, TOKENS_PER_FORWARD // (rows.shape[1] - 1)))
    # only networks with the capabilities `SupportsWindows` and `SupportsDocuments` have these arguments
    visible: dict[str, Any] = {} if visibility == EVERYTHING else {"visibility": visibility}
    options = [visible] * len(batches)
    if documents is not None:
        options = [visible | {"documents": x} for x in cut(documents).flatten(0, 1).split(len(batches[0]))]
    losses = [network.losses(batch, last, **each) for batch, each in zip(batches, options, strict=True)]
    return torch.cat(losses).reshape(len(tokens), -1)


@dataclass(eq=False)
class ProtocolLosses:
    """The sums of the losses of one protocol at one length.

    Args:
        protocol: The protocol.
        length: Evaluation length L in tokens.
        loss: Sums of losses by block of text, or by position in the segment for the protocol ``per_position``.
    """

    protocol: Protocol
    length: int
    loss: "TokenLoss"

    @property
    def by_position(self) -> bool:
        """Whether losses are summed by position instead of by block."""
        return self.protocol.name == "per_position"

    def rows(self) -> list[Row]:
        """Return rows of the results.

        Each block or position has one row, with the sum of its losses in nats. If the number of bytes of the text is
        known, one more row has the sum of all losses in bits.
        """
        rows = self.loss.rows(self.protocol.label, self.length, self.by_position)
        if self.loss.text_bytes.any():
            bits, count = float(self.loss.nll.sum()) / math.log(2), int(self.loss.text_bytes.sum())
            rows.append(Row("bits_per_byte", self.protocol.label, self.length, None, None, bits, count))
        return rows

    def scalars(self) -> dict[str, float]:
        """Return the perplexity, and bits per byte if the bytes of the text are known; {} for ``per_position``."""
        if self.by_position:
            return {}
        name = f"{self.protocol.label}/{self.length}"
        scalars = {f"ppl/{name}": float(self.loss.perplexity())}
        if self.loss.text_bytes.any():
            scalars[f"bits_per_byte/{name}"] = float(self.loss.bits_per_byte())
        return scalars
