"""Evaluation protocols: pure functions of a network and a block of tokens that return the loss of each target.

B blocks, N targets in a block (N + 1 tokens), L evaluation length. For length L a block is cut into N / L segments, so
the targets are the same at every length, and curves differ only by context. Target t is token t + 1 of the block,
t = 0..N - 1.

Losses are negative log-likelihoods in nats, fp32, in the order of the targets; `metrics` sums them. A *window* limits
the attention mask (`windowed`); a *stride* is the number of tokens by which the text that is read moves (`sliding`).
"""

from dataclasses import dataclass
from typing import Literal, get_args
from typing import Protocol as Interface

import torch
from torch import Tensor

from kerple.base.errors import UserError

Name = Literal["full", "windowed", "sliding", "last", "per_position"]
TOKENS_PER_FORWARD = 16_384


class Network(Interface):
    """What the protocols need of a model, such as `kerple.model.transformer.Transformer`."""

    def losses(self, tokens: Tensor, offset: int = 0, window: int | None = None, last: int | None = None) -> Tensor:
        """Losses (B, T) fp32, in nats, of the targets of tokens (B, T+1) int64; or of the last ``last`` targets."""
        ...


def full(network: Network, tokens: Tensor, length: int, *, tokens_per_forward: int = TOKENS_PER_FORWARD) -> Tensor:
    """Score every target in non-overlapping segments of ``length``, with full attention.

    This is the protocol of the paper (Chi et al. 2022, section 5).

    Args:
        network: The model.
        tokens: (B, N+1) int64.
        length: Targets in a segment, 1..N. If it does not divide N, the last segment is shorter.
        tokens_per_forward: Largest number of tokens in one forward pass. A longer segment runs alone.

    Returns:
        (B, N) fp32 losses in nats.

    Raises:
        ValueError: If ``length`` is not in 1..N, or the tokens are not (B, N+1) int64.
    """
    return windowed(network, tokens, length, window=None, tokens_per_forward=tokens_per_forward)


def windowed(
    network: Network,
    tokens: Tensor,
    length: int,
    *,
    window: int | None,
    tokens_per_forward: int = TOKENS_PER_FORWARD,
) -> Tensor:
    """Score as `full`, but limit attention in every layer to the last ``window`` keys, the query's own included.

    Positions and segments are those of `full`, so the difference of the two is the gain from farther tokens.

    Args:
        network: The model.
        tokens: (B, N+1) int64.
        length: Targets in a segment, 1..N.
        window: Number of keys; None for all, which is `full`.
        tokens_per_forward: Largest number of tokens in one forward pass.

    Returns:
        (B, N) fp32 losses in nats.

    Raises:
        ValueError: If ``window`` is not positive; else as `full`.
    """
    block = _targets(tokens, length)
    if window is not None and window < 1:
        raise ValueError(f"window: got {window}, expected at least 1 key, the query's own")
    whole = block // length * length
    parts = [_run(network, _segments(tokens[:, : whole + 1], length, length), tokens_per_forward, window=window)]
    if whole < block:
        parts.append(_run(network, tokens[:, None, whole:], tokens_per_forward, window=window))
    return torch.cat(parts, dim=1)  # (B, N)


def sliding(
    network: Network,
    tokens: Tensor,
    length: int,
    *,
    stride: int,
    skip: int = 0,
    tokens_per_forward: int = TOKENS_PER_FORWARD,
) -> Tensor:
    """Score only the new targets of a context of ``length`` tokens that moves by ``stride`` (Press et al. 2022).

    The text is cut, not the attention mask: positions start at 0 in every step. The first step scores all its targets,
    the last step those that are left. With ``stride = length`` this is `full`. See their appendix B.

    Args:
        network: The model.
        tokens: (B, N+1) int64.
        length: Number of tokens of context, 1..N.
        stride: Number of new targets in each step, 1..length.
        skip: Number of targets at the start of a block that serve as context only. At every ``length <= skip +
            stride``, the same targets are scored, and each has at least ``length - stride`` tokens before it.
        tokens_per_forward: Largest number of tokens in one forward pass.

    Returns:
        (B, N - skip) fp32 losses in nats.

    Raises:
        ValueError: If ``stride`` is not in 1..length or ``skip`` not in 0..N-1; else as `full`.
    """
    block = _targets(tokens, length)
    if not 1 <= stride <= length:
        raise ValueError(f"stride: got {stride}, expected 1..{length}, the length; a larger one would skip targets")
    if not 0 <= skip < block:
        raise ValueError(f"skip: got {skip}, expected 0..{block - 1}, the block has {block} targets")
    end = max(length, min(skip + stride, block))
    parts = [_run(network, tokens[:, None, end - length : end + 1], tokens_per_forward, last=end - skip)]
    steps, rest = divmod(block - end, stride)
    if steps:
        moved = _segments(tokens[:, end + stride - length : end + steps * stride + 1], length, stride)
        parts.append(_run(network, moved, tokens_per_forward, last=stride))
    if rest:
        parts.append(_run(network, tokens[:, None, block - length :], tokens_per_forward, last=rest))
    return torch.cat(parts, dim=1)  # (B, N - skip)


def last(
    network: Network, tokens: Tensor, length: int, *, k: int, tokens_per_forward: int = TOKENS_PER_FORWARD
) -> Tensor:
    """Score as `full`, but only the last ``k`` targets of each segment, which follow at least ``length - k`` tokens.

    Returns:
        (B, N // length * k) fp32 losses in nats, segment by segment. A shorter last segment is left out.

    Raises:
        ValueError: If ``k`` is not in 1..length; else as `full`.
    """
    block = _targets(tokens, length)
    if not 1 <= k <= length:
        raise ValueError(f"k: got {k}, expected 1..{length}, the length; a segment has no more targets")
    whole = block // length * length
    return _run(network, _segments(tokens[:, : whole + 1], length, length), tokens_per_forward, last=k)


def per_position(
    network: Network,
    tokens: Tensor,
    length: int,
    *,
    window: int | None = None,
    tokens_per_forward: int = TOKENS_PER_FORWARD,
) -> Tensor:
    """Score as `full`, or `windowed`, and arrange the losses by segment and position in it.

    Returns:
        (B, N / length, length) fp32 losses in nats.

    Raises:
        ValueError: If ``length`` does not divide N; else as `windowed`.
    """
    block = _targets(tokens, length)
    if block % length:
        raise ValueError(f"length: got {length}, which does not divide the block of {block} targets")
    losses = windowed(network, tokens, length, window=window, tokens_per_forward=tokens_per_forward)
    return losses.unflatten(1, (-1, length))  # (B, N / L, L)


@dataclass(frozen=True)
class Protocol:
    """A protocol with its options; a row of results belongs to one.

    Args:
        name: One of full, windowed, sliding, last, per_position.
        window: Number of keys that a query sees; for windowed, which requires it.
        stride: Number of new targets in each step; for sliding, which requires it.
        skip: Number of targets of a block that are context only; for sliding.
        k: Number of targets scored at the end of a segment; for last, which requires it.

    Raises:
        UserError: If the name is unknown, or an option is missing, out of range or not the protocol's own.
    """

    name: Name
    window: int | None = None
    stride: int | None = None
    skip: int = 0
    k: int | None = None

    def __post_init__(self) -> None:
        if self.name not in get_args(Name):
            raise UserError(f"protocol: got {self.name!r}, expected one of {', '.join(get_args(Name))}")
        for option, owner in (("window", "windowed"), ("stride", "sliding"), ("k", "last")):
            value = getattr(self, option)
            if (value is None) == (self.name == owner):
                told = f"{owner} needs it" if value is None else f"only {owner} has it"
                raise UserError(f"protocol {self.name}: {option}: got {value}, but {told}; give or drop {option}")
            if value is not None and value < 1:
                raise UserError(f"protocol {self.name}: {option}: got {value}, expected a positive number")
        if self.skip < 0 or (self.skip and self.name != "sliding"):
            raise UserError(
                f"protocol {self.name}: skip: got {self.skip}; only sliding has one, and it is not negative"
            )

    @property
    def label(self) -> str:
        """The name with its option, as logs have it: full, windowed512, sliding64, last128, per_position."""
        return f"{self.name}{self.window or self.stride or self.k or ''}"

    def __call__(
        self, network: Network, tokens: Tensor, length: int, tokens_per_forward: int = TOKENS_PER_FORWARD
    ) -> Tensor:
        """Losses (B, n) fp32, in nats, of the n targets of tokens (B, N+1) that `scored` names at ``length``."""
        match self.name:
            case "windowed":
                return windowed(network, tokens, length, window=self.window, tokens_per_forward=tokens_per_forward)
            case "sliding":
                assert self.stride is not None
                return sliding(
                    network,
                    tokens,
                    length,
                    stride=self.stride,
                    skip=self.skip,
                    tokens_per_forward=tokens_per_forward,
                )
            case "last":
                assert self.k is not None
                return last(network, tokens, length, k=self.k, tokens_per_forward=tokens_per_forward)
            case _:
                return full(network, tokens, length, tokens_per_forward=tokens_per_forward)

    def scored(self, length: int, block: int) -> Tensor:
        """Indices (n,) int64 of the targets of a block of ``block`` that are scored at ``length``, in order."""
        targets = torch.arange(self.skip, block)
        if self.k is None:  # all but last
            return targets
        return targets[: block // length * length].unflatten(0, (-1, length))[:, -self.k :].flatten()


def _targets(tokens: Tensor, length: int) -> int:
    if tokens.dim() != 2 or tokens.dtype != torch.int64:
        raise ValueError(f"tokens: got {tokens.dtype} {tuple(tokens.shape)}, expected int64 (B, N+1)")
    block = tokens.shape[1] - 1
    if not 1 <= length <= block:
        raise ValueError(f"length: got {length}, expected 1..{block}: a block has {block} targets")
    return block


def _segments(tokens: Tensor, length: int, stride: int) -> Tensor:
    return tokens.unfold(1, length + 1, stride)  # (B, S, L+1), a view


def _run(
    network: Network,
    segments: Tensor,  # (B, S, L+1)
    tokens_per_forward: int,
    window: int | None = None,
    last: int | None = None,
) -> Tensor:
    rows, length = segments.shape[0] * segments.shape[1], segments.shape[2] - 1
    at_once = max(1, tokens_per_forward // length)
    flat = segments.flatten(0, 1)  # (B·S, L+1)
    parts = [network.losses(flat[i : i + at_once], window=window, last=last) for i in range(0, rows, at_once)]
    losses = torch.cat(parts)  # (B·S, L) or (B·S, last)
    assert losses.dtype in (torch.float32, torch.float64), f"losses came in {losses.dtype}"
    return losses.reshape(segments.shape[0], -1)
