"""Evaluation protocols: how a block of tokens is read to get the loss of each target.

B blocks, N targets in a block (N + 1 tokens), L evaluation length. For length L a block is cut into N / L segments, so
the targets are the same at every length, and curves differ only by context. Target t is token t + 1 of the block,
t = 0..N - 1.

Losses are negative log-likelihoods in nats, fp32 or fp64, in the order of the targets; `metrics` sums them. A
*window* limits the attention mask (`windowed`); a *stride* is the number of tokens by which the text that is read moves
(`sliding`).
"""

import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kerple.base.errors import UserError
from kerple.model.network import Network, Windows
from kerple.positions.visibility import EVERYTHING, Distances, Visibility

Name = Literal["full", "windowed", "keep_first", "sliding", "last", "per_position"]
TOKENS_PER_FORWARD = 16_384
"""Largest number of tokens in one forward pass; a longer segment runs alone."""


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
    """Score as `full`, but limit attention in every layer to the keys that ``visibility`` names.

    Segments are those of `full`, so the difference of the two is the gain from farther tokens. Heads attend to the
    first tokens where nothing else matters (Xiao et al. 2024), so a window without them may do harm by itself; the fall
    in loss from a window with the first four to `full` is what distant text is worth.

    Args:
        network: The model, one with `kerple.model.network.Windows` unless every key is seen.
        tokens: (B, N+1) int64.
        length: Targets in a segment, 1..N.
        visibility: The keys that a query sees.

    Returns:
        (B, N) losses in nats.
    """
    targets = tokens.shape[1] - 1
    assert 1 <= length <= targets
    whole = targets // length * length  # targets in segments that are not shorter
    segments = tokens[:, : whole + 1].unfold(1, length + 1, length)  # (B, S, L+1), a view
    losses = _losses(network, segments, visibility=visibility)
    if whole == targets:
        return losses
    rest = _losses(network, tokens[:, None, whole:], visibility=visibility)
    return torch.cat([losses, rest], dim=1)  # (B, N)


def sliding(network: Network, tokens: Tensor, length: int, *, stride: int, skip: int = 0) -> Tensor:
    """Score only the new targets of a context of ``length`` tokens that moves by ``stride`` (Press et al. 2022).

    The text is cut, not the attention mask: positions start at 0 in every step. The first step scores all its targets,
    the last step those that are left. With ``stride = length`` this is `full`. See their appendix B.

    Args:
        network: The model.
        tokens: (B, N+1) int64.
        length: Number of tokens of context, 1..N.
        stride: Number of new targets in each step, 1..length.
        skip: Number of targets at the start of a block that serve as context only, 0..N-1. At every ``length <= skip +
            stride``, the same targets are scored, and each has at least ``length - stride`` tokens before it.

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
        visibility: The keys that a query sees; only windowed and keep_first limit them.
        stride: Number of new targets in each step; only for sliding.
        skip: Number of targets of a block that are context only; only for sliding.
        k: Number of targets scored at the end of a segment; only for last.
    """

    name: Name
    visibility: Visibility = EVERYTHING
    stride: int | None = None
    skip: int = 0
    k: int | None = None

    @property
    def label(self) -> str:
        """The name with its option, as logs have it: full, windowed512, keep_first4, keep_first4_cache, last128."""
        distances = "" if self.visibility.distances == "true" else f"_{self.visibility.distances}"
        option = self.visibility.first or self.visibility.window or self.stride or self.k or ""
        return f"{self.name}{option}{distances}"

    def part_of_full(self, length: int) -> bool:
        """Whether the losses at ``length`` are all or some of those of `full`."""
        if self.visibility.window is not None:
            return self.visibility.window >= length
        if self.stride is not None:
            return self.stride == length and self.skip % length == 0
        return True

    def __call__(self, network: Network, tokens: Tensor, length: int) -> Tensor:
        """Losses (B, n) in nats, of the n targets of tokens (B, N+1) that `scored_targets` names."""
        if self.part_of_full(length):
            losses = full(network, tokens, length)
            return losses[:, self.scored_targets(length, losses.shape[1])]
        if self.stride is None:
            return windowed(network, tokens, length, self.visibility)
        return sliding(network, tokens, length, stride=self.stride, skip=self.skip)

    def scored_targets(self, length: int, block_length: int) -> Tensor:
        """Indices (n,) int64 of the targets of a block of ``block_length`` that are scored at ``length``, in order."""
        targets = torch.arange(self.skip, block_length)
        if self.k is None:  # all but last
            return targets
        return targets[: block_length // length * length].unflatten(0, (-1, length))[:, -self.k :].flatten()


def ordered_lengths(lengths: Sequence[int]) -> list[int]:
    """The lengths in ascending order, each once.

    Raises:
        UserError: If there is none, one is not positive, or one does not divide the longest, so that a block of that
            many targets could not be cut into equal segments.
    """
    ordered = sorted(set(lengths))
    if not ordered or ordered[0] < 1 or any(ordered[-1] % length for length in ordered):
        raise UserError(f"lengths: got {list(lengths)}, expected positive numbers that all divide the longest")
    return ordered


def choose_protocols(
    names: Sequence[Name],
    lengths: Sequence[int],
    block_length: int,
    *,
    window: int | None,
    keep_first: int | None,
    distances: Distances,
    stride: int | None,
    skip: int,
    k: int | None,
    training_length: int = 1,
) -> list[Protocol]:
    """The named protocols with their options, each once.

    Args:
        names: Names of protocols.
        lengths: Evaluation lengths in ascending order.
        block_length: Number of targets in a block.
        window: Option of windowed and keep_first; None for the training length.
        keep_first: Option of keep_first.
        distances: Option of keep_first, see `kerple.positions.visibility.Visibility`.
        stride: Option of sliding, at most the shortest length.
        skip: Option of sliding: 0, or at least the longest length minus the stride, and less than the block. Then
            every scored target has a full window at every length.
        k: Option of last, at most the shortest length.
        training_length: Training length in tokens.

    Raises:
        UserError: If a name is unknown, an option is missing or out of range, or belongs to a protocol not named.
    """
    if not names or not set(names) <= set(typing.get_args(Name)):
        raise UserError(f"protocols: got {list(names)}, expected some of {', '.join(typing.get_args(Name))}")
    options = {
        "windowed": ("window", window),
        "keep_first": ("keep_first", keep_first),
        "sliding": ("stride", stride),
        "last": ("k", k),
    }
    for name, (option, value) in options.items():
        shared = option == "window" and "keep_first" in names
        if name not in names and value is not None and not shared:
            raise UserError(f"{option}: got {value}, expected {name} among protocols; add it or drop {option}")
        if name not in names or (name == "windowed" and value is None):
            continue
        if value is None or value < 1 or (name != "windowed" and value > lengths[0]):
            limit = "" if name == "windowed" else f", at most {lengths[0]}, the shortest length"
            raise UserError(f"{option}: got {value}, expected a positive number{limit}, for the protocol {name}")
    if distances != "true" and "keep_first" not in names:
        raise UserError(f"distances: got {distances}, expected keep_first among protocols; add it or drop distances")
    minimum = lengths[-1] - (stride or 0)
    if skip and ("sliding" not in names or not minimum <= skip < block_length):
        raise UserError(
            f"skip: got {skip}, expected 0, or, with sliding among protocols, at least {minimum}, the longest length "
            f"less the stride, and less than {block_length}, the block_length; a longer one leaves more targets"
        )
    settings: dict[str, dict[str, Any]] = {
        "windowed": {"visibility": Visibility(window or training_length)},
        "keep_first": {
            "visibility": Visibility(window or training_length, keep_first or 0, distances if keep_first else "true")
        },
        "sliding": {"stride": stride, "skip": skip},
        "last": {"k": k},
    }
    return [Protocol(name, **settings.get(name, {})) for name in dict.fromkeys(names)]


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
