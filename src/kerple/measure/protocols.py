"""Evaluation protocols: ways to read a block of tokens and score its targets.

Notation: B blocks, N targets in a block (N + 1 tokens), L evaluation length. Target t is token t + 1 of the block,
t = 0..N - 1. For length L a block is cut into N / L segments. The targets are the same at every length, so curves over
length differ only by context.

Losses are negative log-likelihoods in nats, fp32 or fp64, in the order of the targets; `metrics` sums them. A *window*
limits the attention mask (`windowed`). A *stride* is the number of tokens by which a context moves (`sliding`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kerple.base.errors import UserError
from kerple.model.network import Network, Windows
from kerple.positions.visibility import EVERYTHING, Visibility

Name = Literal["full", "windowed", "keep_first", "sliding", "last", "per_position"]
TOKENS_PER_FORWARD = 16_384
"""Largest number of tokens in a forward pass of several segments."""


def full(network: Network, tokens: Tensor, length: int) -> Tensor:
    """Score every target in non-overlapping segments of ``length``, with full attention.

    This is the protocol of the paper (Chi et al. 2022, section 5).

    Args:
        network: The model.
        tokens: (B, N+1) int64.
        length: Targets in a segment, 1..N. If it does not divide N, the last segment is shorter.

    Returns:
        (B, N) losses in nats.
    """
    return windowed(network, tokens, length, EVERYTHING)


def windowed(network: Network, tokens: Tensor, length: int, visibility: Visibility) -> Tensor:
    """Score the segments of `full` with attention limited in every layer to the keys of ``visibility``.

    The difference from `full` is the gain from farther tokens. Heads attend to the first tokens if no other key is
    relevant (Xiao et al. 2024), so a window without them can raise the loss by itself. The loss with a window and the
    first four tokens, minus the loss of `full`, is therefore the gain from distant text.

    Args:
        network: The model, a `kerple.model.network.Windows` unless every key is visible.
        tokens: (B, N+1) int64.
        length: Targets in a segment, 1..N.
        visibility: The keys that a query sees.

    Returns:
        (B, N) losses in nats.
    """
    targets = tokens.shape[1] - 1
    assert 1 <= length <= targets
    whole = targets // length * length  # targets in segments of the full length
    segments = tokens[:, : whole + 1].unfold(1, length + 1, length)  # (B, S, L+1), a view
    losses = _losses(network, segments, visibility=visibility)
    if whole == targets:
        return losses
    rest = _losses(network, tokens[:, None, whole:], visibility=visibility)
    return torch.cat([losses, rest], dim=1)  # (B, N)


def sliding(network: Network, tokens: Tensor, length: int, *, stride: int, skip: int = 0) -> Tensor:
    """Score only the new targets of a context of ``length`` tokens that moves by ``stride``.

    The text is cut, not the attention mask: positions start at 0 in every step. The first step scores all of its
    targets, and the last step the remaining ones. With ``stride = length`` this is `full`. Source: Press et al. 2022,
    appendix B.

    Args:
        network: The model.
        tokens: (B, N+1) int64.
        length: Number of tokens of context, 1..N.
        stride: Number of new targets in each step, 1..length.
        skip: Number of targets at the start of a block that are only context, 0..N-1. At every ``length <= skip +
            stride`` the same targets are scored, and each has at least ``length - stride`` tokens of context.

    Returns:
        (B, N - skip) losses in nats.
    """
    targets = tokens.shape[1] - 1
    assert 1 <= stride <= length <= targets
    assert 0 <= skip < targets
    end = max(length, min(skip + stride, targets))  # of the first step
    parts = [_losses(network, tokens[:, None, end - length : end + 1], last=end - skip)]
    steps, rest = divmod(targets - end, stride)
    if steps:
        moved = tokens[:, end + stride - length : end + steps * stride + 1].unfold(1, length + 1, stride)
        parts.append(_losses(network, moved, last=stride))
    if rest:
        parts.append(_losses(network, tokens[:, None, targets - length :], last=rest))
    return torch.cat(parts, dim=1)  # (B, N - skip)


@dataclass(frozen=True)
class Protocol:
    """A protocol with its options.

    Args:
        name: One of full, windowed, keep_first, sliding, last, per_position.
        visibility: The keys that a query sees; limited only in windowed and keep_first.
        stride: Number of new targets in each step of sliding.
        skip: Number of targets at the start of a block that sliding does not score.
        k: Number of targets at the end of a segment that last scores.
    """

    name: Name
    visibility: Visibility = EVERYTHING
    stride: int | None = None
    skip: int = 0
    k: int | None = None

    @property
    def label(self) -> str:
        """The name with its option: full, windowed512, keep_first4, keep_first4_cache, last128."""
        distances = "" if self.visibility.distances == "true" else f"_{self.visibility.distances}"
        option = self.visibility.first or self.visibility.window or self.stride or self.k or ""
        return f"{self.name}{option}{distances}"

    def part_of_full(self, length: int) -> bool:
        """Whether the losses at ``length`` are a subset of those of `full`."""
        if self.visibility.window is not None:
            return self.visibility.window >= length
        if self.stride is not None:
            return self.stride == length and self.skip % length == 0
        return True

    def __call__(self, network: Network, tokens: Tensor, length: int) -> Tensor:
        """Losses in nats, (B, n), of the n targets of `scored_targets` in tokens (B, N+1)."""
        if self.part_of_full(length):
            losses = full(network, tokens, length)
            return losses[:, self.scored_targets(length, losses.shape[1])]
        if self.stride is None:
            return windowed(network, tokens, length, self.visibility)
        return sliding(network, tokens, length, stride=self.stride, skip=self.skip)

    def scored_targets(self, length: int, block_length: int) -> Tensor:
        """Indices of the scored targets of a block of ``block_length`` at ``length``, (n,) int64, ascending."""
        targets = torch.arange(self.skip, block_length)
        if self.k is None:  # every protocol except last
            return targets
        return targets[: block_length // length * length].unflatten(0, (-1, length))[:, -self.k :].flatten()


def ordered_lengths(lengths: Sequence[int]) -> list[int]:
    """The lengths in ascending order, each once.

    Raises:
        UserError: If there is none, one is not positive, or one does not divide the longest. A block of the longest
            length could then not be cut into equal segments.
    """
    ordered = sorted(set(lengths))
    if not ordered or ordered[0] < 1 or any(ordered[-1] % length for length in ordered):
        raise UserError(f"lengths: got {list(lengths)}, expected positive numbers that all divide the longest")
    return ordered


def _losses(network: Network, segments: Tensor, last: int | None = None, visibility: Visibility = EVERYTHING) -> Tensor:
    """Losses (B, S·L), or (B, S·last), of the segments (B, S, L+1)."""
    rows = segments.flatten(0, 1)  # (B·S, L+1)
    batch_size = max(1, TOKENS_PER_FORWARD // (rows.shape[1] - 1))
    if visibility == EVERYTHING:
        parts = [network.losses(batch, last) for batch in rows.split(batch_size)]
    else:
        assert isinstance(network, Windows)
        parts = [network.losses(batch, last, visibility) for batch in rows.split(batch_size)]
    return torch.cat(parts).reshape(len(segments), -1)
