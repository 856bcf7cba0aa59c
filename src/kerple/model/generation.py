"""Writing text token by token, with a cache of keys and values."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kerple.errors import UserError
from kerple.model.transformer import Transformer


class _Reader:
    """Logits after the last of the tokens so far, each token read once where the strategy allows it."""

    def __init__(self, network: Transformer, window: int | None) -> None:
        self.network, self.window = network, window
        # angles that depend on the length of the input make remembered keys wrong: then everything is read again
        self.cache = network.new_cache(window) if all(p.prefix_consistent for p in network.positions) else None

    def __call__(self, tokens: Tensor) -> Tensor:
        known = 0 if self.cache is None else self.cache.length
        return self.network(tokens[:, known:], window=self.window, cache=self.cache)[:, -1]  # (B, V)


def choose(
    logits: Tensor,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One token for each row.

    Args:
        logits: (B, V).
        temperature: Logits are divided by it; 0 takes the largest.
        top_k: Only the k likeliest tokens, k >= 1.
        top_p: Only the likeliest tokens that together have this probability, in (0, 1] (Holtzman et al. 2020,
            arXiv 1904.09751); the first that reaches it included.
        generator: Source of randomness.

    Returns:
        (B,) int64.

    Raises:
        UserError: If a number is out of range.
    """
    if not temperature >= 0:  # nan too
        raise UserError(f"temperature: got {temperature}, expected 0 (the likeliest token) or more")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k: got {top_k}, expected at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"top_p: got {top_p}, expected a probability in (0, 1]")
    if temperature == 0:
        return logits.argmax(-1)
    ordered, order = logits.float().sort(-1, descending=True)  # (B, V) each
    # differences, or a temperature close to 0 makes infinities whose difference is not a number
    scaled = (ordered - ordered[:, :1]) / max(temperature, torch.finfo(torch.float32).tiny)
    if top_k is not None:
        scaled[:, top_k:] = float("-inf")
    probabilities = scaled.softmax(-1)
    if top_p is not None:
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(before >= top_p, 0.0)
    return order.gather(-1, torch.multinomial(probabilities, 1, generator=generator)).squeeze(-1)


def generate(
    network: Transformer,
    prompt: Tensor,
    steps: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: int | None = None,
    window: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Continue prompts of equal length, one token at a time as they are made.

    Args:
        network: In evaluation mode.
        prompt: (B, T) int64, T >= 1.
        steps: How many tokens at most.
        temperature: As for `choose`, like ``top_k`` and ``top_p``.
        stop: A row that has written this token writes nothing else; when all have, the iterator ends.
        window: Attention sees this many keys; None for all.
        generator: Source of randomness.

    Yields:
        (B,) int64.

    Raises:
        UserError: If the prompt is empty, or the strategy cannot reach a position.
    """
    if prompt.shape[1] < 1:
        raise UserError("prompt: got no tokens, expected at least one to continue")
    reader, tokens = _Reader(network, window), prompt
    stopped = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    for _ in range(steps):
        with torch.inference_mode():
            new = choose(reader(tokens), temperature, top_k, top_p, generator)  # (B,)
            if stop is not None:
                new = new.masked_fill(stopped, stop)
                stopped = stopped | (new == stop)
            tokens = torch.cat([tokens, new[:, None]], 1)  # (B, T + 1)
        yield new
        if stop is not None and bool(stopped.all()):
            return


@torch.inference_mode()
def fill_in(network: Transformer, tokens: Tensor, scored: Tensor, window: int | None = None) -> Tensor:
    """Have the model write the scored targets greedily, each after what it wrote itself; the others it is told.

    Rows may have prompts of different lengths, and answers interrupted by what is given: padding is on the right, so
    every row stands at its own positions.

    Args:
        network: In evaluation mode.
        tokens: (B, T + 1) int64; what stands at scored targets is never read.
        scored: (B, T) bool, which targets the model writes.
        window: Attention sees this many keys; None for all.

    Returns:
        (B, T + 1) int64, ``tokens`` with the scored targets replaced by what was written.
    """
    written = tokens.clone()
    asked = scored.any(0).nonzero().flatten().tolist()
    if not asked:
        return written
    reader = _Reader(network, window)
    for t in range(asked[0], asked[-1] + 1):
        logits = reader(written[:, : t + 1])  # (B, V)
        written[:, t + 1] = torch.where(scored[:, t], logits.argmax(-1), tokens[:, t + 1])
    return written
