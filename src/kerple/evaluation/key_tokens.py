"""Which targets need their far context, as a fixed evaluator judges (LongPPL, Fang et al. 2024, arXiv 2410.23771)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from kerple.errors import UserError
from kerple.evaluation.protocols import Network, full, sliding


@dataclass(frozen=True)
class Criterion:
    """What makes a target a key token.

    Args:
        short: Tokens of the short context.
        stride: How far the short context moves between two readings: it holds short - stride tokens or more.
        gain: A key token's log-probability with all of the context exceeds that with the short one by more than this.
        likely: And is itself above this, in nats: the evaluator knows it.
    """

    short: int
    stride: int
    gain: float = 2.0
    likely: float = -2.0

    def __post_init__(self) -> None:
        if not 1 <= self.stride <= self.short:
            raise UserError(f"stride: got {self.stride}, expected 1..{self.short}, the tokens of the short context")


def key_targets(evaluator: Network, tokens: Tensor, criterion: Criterion) -> Tensor:
    """Whether each target of tokens (B, N+1) int64 is a key token; (B, N) bool.

    The first ``short`` targets have the same context either way and are none.
    """
    block = tokens.shape[1] - 1
    if criterion.short >= block:
        raise UserError(f"short: got {criterion.short}, expected less than {block}, the tokens of the long context")
    long = full(evaluator, tokens, block)
    short = sliding(evaluator, tokens, criterion.short, stride=criterion.stride)
    chosen = (short - long > criterion.gain) & (-long > criterion.likely)
    chosen[:, : criterion.short] = False  # equal contexts: a difference is rounding
    return chosen


def carried_over(own: Sequence[bytes], spans: Sequence[tuple[int, int]], keys: Sequence[bool]) -> list[bool]:
    """Key tokens of one tokenisation as those of another of the same text: what overlaps with one is one.

    Args:
        own: Bytes of each token of the model that is scored.
        spans: First byte and the one after the last of each of the evaluator's tokens, ascending.
        keys: Which of them are key tokens.

    Returns:
        One entry for each of ``own``.
    """
    marked = torch.zeros(sum(map(len, own)) + 1, dtype=torch.bool)
    for (first, last), key in zip(spans, keys, strict=True):
        if key:
            marked[first:last] = True
    before = torch.cat([torch.zeros(1, dtype=torch.int64), marked.cumsum(0)])
    end = torch.tensor([0, *map(len, own)]).cumsum(0)
    return (before[end[1:]] > before[end[:-1]]).tolist()


def spelling(tokenizer: Tokenizer, ending: int) -> Callable[[int], bytes]:
    """Bytes of each token of a byte-level tokenizer; none for ``ending``, the token that ends documents.

    Raises:
        UserError: If a token is not spelt in bytes.
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
    """Spans of characters of a text as spans of its bytes; a lone surrogate stands for one byte that is no text."""
    sizes = torch.tensor([0] + [1 if "\udc80" <= c <= "\udcff" else len(c.encode()) for c in text]).cumsum(0).tolist()
    return [(sizes[first], sizes[last]) for first, last in offsets]


@lru_cache(maxsize=1)
def _letters() -> dict[str, int]:
    """The letter that byte-level BPE writes for each byte (Radford et al. 2019), reversed."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    made = {chr(byte): byte for byte in printed}
    others = (byte for byte in range(256) if byte not in printed)
    made |= {chr(256 + i): byte for i, byte in enumerate(others)}
    assert set(made) == set(ByteLevel.alphabet())
    return made
