"""Choice of the key tokens of LongPPL: targets that need far context (Fang et al. 2024, arXiv 2410.23771).

The callback `LongPerplexity` scores models on them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from kerple.base.errors import UserError
from kerple.evaluation.protocols import Network, full, sliding


@dataclass(frozen=True)
class Criterion:
    """Settings that decide which targets are key tokens.

    Args:
        short: Number of tokens in the short context.
        stride: Number of tokens by which the short context moves. It then holds at least short - stride tokens.
        gain: The whole context must raise a key token's log-probability by more than this, in nats.
        likely: With the whole context, the log-probability must be above this, in nats.

    Raises:
        UserError: If the stride is not in 1..short.
    """

    short: int
    stride: int
    gain: float = 2.0
    likely: float = -2.0

    def __post_init__(self) -> None:
        if not 1 <= self.stride <= self.short:
            raise UserError(f"stride: got {self.stride}, expected 1..{self.short}, the tokens of the short context")


def key_targets(evaluator: Network, tokens: Tensor, criterion: Criterion) -> Tensor:
    """Whether each target of tokens (B, N+1) int64 is a key token for the evaluator; (B, N) bool.

    The first ``short`` targets have the same context in both readings and are never key tokens.

    Raises:
        UserError: If the short context is not shorter than the block.
    """
    block = tokens.shape[1] - 1
    if criterion.short >= block:
        raise UserError(f"short: got {criterion.short}, expected less than {block}, the tokens of the long context")
    long = full(evaluator, tokens, block)
    short = sliding(evaluator, tokens, criterion.short, stride=criterion.stride)
    chosen = (short - long > criterion.gain) & (-long > criterion.likely)
    chosen[:, : criterion.short] = False  # their contexts are equal, so a difference is rounding
    return chosen


def carried_over(own: Sequence[bytes], spans: Sequence[tuple[int, int]], keys: Sequence[bool]) -> list[bool]:
    """Carry key tokens over to another tokenisation of the same text: a token that overlaps with one becomes one.

    Args:
        own: Bytes of each token of the model that is scored.
        spans: The bytes first..last - 1 of each of the evaluator's tokens, in ascending order.
        keys: Whether each of the evaluator's tokens is a key token.

    Returns:
        Whether each token of ``own`` is a key token.
    """
    marked = torch.zeros(sum(map(len, own)) + 1, dtype=torch.bool)
    for (first, last), key in zip(spans, keys, strict=True):
        if key:
            marked[first:last] = True
    before = torch.cat([torch.zeros(1, dtype=torch.int64), marked.cumsum(0)])
    end = torch.tensor([0, *map(len, own)]).cumsum(0)
    return (before[end[1:]] > before[end[:-1]]).tolist()


def spelling(tokenizer: Tokenizer, ending: int) -> Callable[[int], bytes]:
    """A function from a token id of a byte-level tokenizer to its bytes; ``ending``, which ends documents, has none.

    Raises:
        UserError: If a token is not spelt in bytes; raised by the function.
    """
    letters = _letters()

    @cache
    def spell(token: int) -> bytes:
        if token == ending:
            return b""
        text = tokenizer.id_to_token(token) or ""
        if not text or any(c not in letters for c in text):
            raise UserError(f"tokenizer: token {token} ({text!r}) is not spelt in bytes; use the evaluator's tokenizer")
        return bytes(letters[c] for c in text)

    return spell


def byte_spans(text: str, offsets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Convert spans of a text's characters to spans of its bytes. A lone surrogate stands for one byte."""
    sizes = torch.tensor([0] + [1 if "\udc80" <= c <= "\udcff" else len(c.encode()) for c in text]).cumsum(0).tolist()
    return [(sizes[first], sizes[last]) for first, last in offsets]


@lru_cache(maxsize=1)
def _letters() -> dict[str, int]:
    """The byte for each letter of byte-level BPE's alphabet (Radford et al. 2019)."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    made = {chr(byte): byte for byte in printed}
    others = (byte for byte in range(256) if byte not in printed)
    made |= {chr(256 + i): byte for i, byte in enumerate(others)}
    assert set(made) == set(ByteLevel.alphabet())
    return made
