"""Generation of tokens, one at a time, with a cache of keys and values."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kerple.base.errors import UserError, require
from kerple.positions.visibility import EVERYTHING, Visibility


def _next_token_logits(
    network: Any, visibility: Visibility = EVERYTHING, document_end: int | None = None
) -> Callable[[Tensor], Tensor]:
    """Return a function from all tokens so far, (B, T) int64, to the logits of the next token, (B, V).

    It keeps a cache between calls if the strategy allows one. The tokens of a call must be those of the call before,
    followed by at least one new token. With ``document_end``, this token begins a new document.
    """
    # without a cache if keys depend on the length of the input, because cached keys would be wrong
    cache = network.new_cache(visibility) if network.prefix_consistent else None
    cached = 0

    def next_logits(tokens: Tensor) -> Tensor:
        nonlocal cached
        new = slice(cached, None)
        cached = 0 if cache is None else tokens.shape[1]
        options = {}
        if document_end is not None:
            options["documents"] = (tokens == document_end).cumsum(1)[:, new]
        logits = network(tokens[:, new], visibility, cache=cache, last=1, **options)[:, -1]  # (B, V)
        check_finite(logits)
        return logits

    return next_logits


def check_finite(logits: Tensor) -> None:
    """Raise a UserError if the largest logit of a position, which a prediction selects, is NaN or infinite."""
    if not logits.amax(-1).isfinite().all():
        raise UserError("model: the logits are not finite; check the weights for NaN")


def choose(
    logits: Tensor,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw one token for each row.

    Args:
        logits: Logits (B, V) of V tokens for each row of the batch.
        temperature: Divisor of the logits; 0 selects the most likely token.
        top_k: Draw only from the k most likely tokens, k >= 1; None for all.
        top_p: Draw only from the smallest set of most likely tokens whose probabilities, after ``top_k``, sum to at
            least this number in (0, 1] (Holtzman et al. 2020, arXiv 1904.09751); None for all.
        generator: Generator of the random numbers; None for torch's default generator.

    Returns:
        The token of each row, (B,) int64.

    Raises:
        UserError: If a number is out of range.
    """
    # refuses NaN too
    require(temperature >= 0, "temperature", temperature, "0 (selects the most likely token) or more")
    require(top_k is None or top_k >= 1, "top_k", top_k, "at least 1, or none for all tokens")
    require(top_p is None or 0 < top_p <= 1, "top_p", top_p, "a probability in (0, 1]")
    if temperature == 0:
        return logits.argmax(-1)
    ordered, order = logits.float().sort(-1, descending=True)  # (B, V) each
    # the largest logit is subtracted first: a temperature near 0 would scale it to ∞, for which softmax returns NaN
    scaled = (ordered - ordered[:, :1]) / max(temperature, torch.finfo(torch.float32).tiny)
    if top_k is not None:
        scaled[:, top_k:] = float("-inf")
    probabilities = scaled.softmax(-1)
    if top_p is not None:
        previous_sum = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(previous_sum >= top_p, 0.0)
    return order.gather(-1, torch.multinomial(probabilities, 1, generator=generator)).squeeze(-1)


def generate(
    network: Any,
    prompt: Tensor,
    steps: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: int | None = None,
    visibility: Visibility = EVERYTHING,
    generator: torch.Generator | None = None,
    document_end: int | None = None,
) -> Iterator[Tensor]:
    """Continue prompts of equal length, one token at a time.

    Args:
        network: A `kerple.model.Transformer` in evaluation mode.
        prompt: Tokens (B, T) int64, T >= 1.
        steps: Largest number of new tokens in each row.
        temperature: See `choose`.
        top_k: See `choose`.
        top_p: See `choose`.
        stop: Stop token; None for none. A row that has generated it repeats it to the end. Generation ends when all
            rows have generated it.
        visibility: Keys that a query sees in every layer.
        generator: See `choose`.
        document_end: Token that begins a new document, for networks trained with ``documents``; later tokens do not see
            earlier documents. None if the text is one document.

    Yields:
        The next token of each row, (B,) int64.

    Raises:
        UserError: If a prompt is empty, a number is out of range, the strategy cannot represent a position, or logits
            are not finite.
    """
    require(prompt.shape[1] >= 1, "prompt", "no tokens", "at least one to continue")
    next_logits, tokens = _next_token_logits(network, visibility, document_end), prompt
    stopped = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    for _ in range(steps):
        with torch.inference_mode():
            new = choose(next_logits(tokens), temperature, top_k, top_p, generator)  # (B,)
            if stop is not None:
                new = new.masked_fill(stopped, stop)
                stopped = stopped | (new == stop)
            tokens = torch.cat([tokens, new[:, None]], 1)  # (B, T + 1)
        yield new
        if stop is not None and bool(stopped.all()):
            return


@torch.inference_mode()
def fill_in(network: Any, tokens: Tensor, scored: Tensor) -> Tensor:
    """Return ``tokens`` with the scored targets replaced by the most likely tokens, generated from left to right.

    Rows may have prompts of different lengths. Tokens that are not generated may follow generated ones. Padding must be
    on the right, so that it does not change positions.

    Args:
        network: A `kerple.model.Transformer` in evaluation mode.
        tokens: Tokens (B, T + 1) int64. The values of scored targets do not influence the result.
        scored: Which targets are generated, (B, T) bool; target t is token t + 1.

    Returns:
        Tensor (B, T + 1) int64.
    """
    result, next_logits = tokens.clone(), _next_token_logits(network)
    for t in scored.any(0).nonzero().flatten().tolist():  # targets that are generated in at least one row
        logits = next_logits(result[:, : t + 1])  # (B, V)
        result[:, t + 1] = torch.where(scored[:, t], logits.argmax(-1), tokens[:, t + 1])
    return result
