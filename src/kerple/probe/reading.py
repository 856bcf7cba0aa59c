"""`Reading`: a way in which a model reads a text, such as with a cache, with padding, or packed behind another text."""

from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from kerple.base.errors import UserError
from kerple.hf.adapter import reset_dynamic_rope
from kerple.hf.foreign_errors import foreign_errors
from kerple.hf.position_limit import longest_input, takes_positions
from kerple.hf.windowed_attention import attention_replaced

# number of padding tokens, of tokens of the other document or of a continuation, and of positions of a shift
EXTRA = 16
TRIAL = "kerple_reading"  # name of an attention function in transformers' registry
PART = 256  # largest number of tokens that are read at once after the first half of a text


@dataclass(frozen=True)
class Reading:
    """A way in which a model reads a text. All ways give the same logits, up to rounding, if the model has no fault.

    Args:
        cached: Whether the model uses a cache. It reads the first half of the text, the rest in parts, and the last
            tokens one by one. A packed text is read at once.
        decoded: Largest number of last tokens that are read one by one.
        packed: Whether another document stands before the text in the same row, with ``position_ids`` that restart.
        padding: Side on which 16 padding tokens are added: ``none``, ``left`` or ``right``.
        attention: Attention implementation of transformers, such as ``eager`` or ``sdpa``; empty for the model's own.
        shift: Number that is added to all positions.
        continued: Whether 16 other tokens follow the text.
        batched: Whether the batch contains other texts.
    """

    cached: bool = False
    decoded: int = 8
    packed: bool = False
    padding: Literal["none", "left", "right"] = "none"
    attention: str = ""
    shift: int = 0
    continued: bool = False
    batched: bool = False

    def check(self, model: Any) -> None:
        """Check that a model uses the attention implementation. This may run a part of its layers.

        Raises:
            UserError: If the model does not have the implementation, or would ignore it.
        """
        if not self.attention:
            return
        if self.attention != "eager" and not getattr(model, f"_supports_{self.attention}", False):
            raise UserError(f"the model has no {self.attention} attention")
        if not _uses_registry(model):
            raise UserError(f"the model does not use transformers' registry, so {self.attention} attention is not used")

    def logits(self, model: Any, tokens: Tensor) -> Tensor:
        """Return the logits of a text, (B, T, V). An attention implementation must have passed `check`.

        Args:
            model: A `transformers.PreTrainedModel`.
            tokens: The text, (B, T) int64.

        Raises:
            UserError: If the model cannot read the text in this way.
        """
        batch, length = tokens.shape
        first = EXTRA if self.packed or self.padding == "left" else 0
        last = EXTRA if self.continued or self.padding == "right" else 0
        extra = tokens.flip(1).repeat(1, -(-EXTRA // length))[:, :EXTRA]
        options: dict[str, Any] = {}
        if self.padding != "none":
            options["attention_mask"] = F.pad(torch.ones_like(tokens), (first, last))
        if self.packed or self.shift:
            if not takes_positions(model):
                raise UserError("the model takes no position_ids")
            ids = [self.shift + torch.arange(size) for size in (first, length + last)]
            options["position_ids"] = torch.cat(ids).to(tokens.device)[None]
        tokens = torch.cat([extra[:, :first], tokens, extra[:, :last]], 1)
        if self.batched:
            tokens = torch.cat([tokens, tokens.flip(1)])
            options = {name: x.repeat(len(tokens) // len(x), 1) for name, x in options.items()}
        whole = tokens.shape[1]
        positions = options.get("position_ids", torch.arange(whole))
        sizes = [whole] if self.cached and self.packed else self._parts(whole) if self.cached else None
        try:
            with attention_replaced(model, self.attention) if self.attention else nullcontext():
                return read_logits(model, tokens, sizes, **options)[:batch, first : first + length]
        except UserError as error:
            lowest, highest, limit = int(positions.min()), int(positions.max()), longest_input(model)
            if limit is None or 0 <= lowest <= highest < limit:
                raise
            expected = f"0 to {limit - 1}; use a shorter text or another shift"
            raise UserError(f"positions: got {lowest} to {highest}, expected {expected}") from error

    def _parts(self, length: int) -> list[int]:
        """Return the numbers of tokens of the forward passes in which ``length`` tokens are read with a cache."""
        first = max(1, length // 2)
        single = min(self.decoded, length - first)
        middle = length - first - single
        return [first, *(min(PART, middle - i) for i in range(0, middle, PART)), *[1] * single]


class _CalledError(Exception):
    """Ends a forward pass at its first call of an attention function."""


def _uses_registry(model: Any) -> bool:
    """Return whether a model calls an attention function of transformers' registry. Others ignore an implementation."""

    def attention(*args: Any, **options: Any) -> NoReturn:
        raise _CalledError

    try:
        with attention_replaced(model, TRIAL, attention), suppress(UserError):  # of a model without its mask
            read_logits(model, torch.zeros(1, 2, dtype=torch.int64, device=model.device))
    except _CalledError:
        return True
    return False


def read_logits(
    model: Any, tokens: Tensor, sizes: list[int] | None = None, cache: Any = None, **options: Any
) -> Tensor:
    """Return the logits of tokens, (B, T, V).

    Args:
        model: A `transformers.PreTrainedModel`.
        tokens: The tokens, (B, T) int64.
        sizes: Numbers of tokens of the parts that are read one after the other with a cache; None to read all tokens
            in one forward pass without a cache.
        cache: Cache of tokens before these, or None.
        **options: Further arguments of the forward pass. With ``sizes``, a part gets its columns of ``position_ids``,
            and the columns of ``attention_mask`` up to its last token.

    Raises:
        UserError: If the model raises an error, or ``sizes`` is given and the model returns no cache.
    """
    reset_dynamic_rope(model)
    if sizes is None:
        with foreign_errors("model: it cannot read a short text", "use another model"):
            return model(input_ids=tokens, use_cache=False, **options).logits
    logits, begin = [], 0
    for part in tokens.split(sizes, 1):
        end = begin + part.shape[1]
        columns = {"position_ids": slice(begin, end), "attention_mask": slice(end)}
        of_part = {name: value[:, columns[name]] if name in columns else value for name, value in options.items()}
        of_part |= {} if cache is None else {"cache": cache}
        begin = end
        with foreign_errors("model: it cannot read a short text with a cache", "use another model"):
            output = model(input_ids=part, use_cache=True, **of_part)
            logits.append(output.logits)
        if (cache := output.get("cache")) is None:
            raise UserError("the model has no cache")
    return torch.cat(logits, 1)
