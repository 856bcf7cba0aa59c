"""The parts of `probe` that read text: where it stops helping, far positions in a minute, and scalings of RoPE."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from kerple.base.errors import UserError
from kerple.base.progress import Progress, duration
from kerple.data.prepare.corpora import find_corpus
from kerple.data.prepare.readers import Document
from kerple.data.text import Text
from kerple.hf.rope import scaled
from kerple.measure.extrapolation import Extrapolation
from kerple.measure.far_context import FarContext
from kerple.measure.gap import GapCurve
from kerple.measure.measure import Measure, training_length
from kerple.measure.result import Result
from kerple.measure.runner import Runner


def read_text(corpus: str, tokenizer: Any) -> Text:
    """The documents of a corpus (see `find_corpus`) in the tokens of a `tokenizers.Tokenizer`."""
    documents = (d.text for d in find_corpus(corpus).documents() if isinstance(d, Document))
    return Text.of_strings(documents, tokenizer, f"the corpus {corpus}")


def measure_on_text(
    network: Any, text: Text, parts: list[str], length: int | None = None, blocks: int = 4
) -> list[Result]:
    """Run the measures of some parts, and print first how long they will take.

    Args:
        network: A `kerple.model.network.Network`; scalings need one around a model of transformers.
        text: The text.
        parts: Some of ``gap``, ``window`` and ``scalings``.
        length: Longest evaluation length in tokens; None for twice the training length.
        blocks: Number of blocks of the longest length.

    Raises:
        UserError: If the text is too short, the network has no `model` or no RoPE to scale, or ``length`` is not above
            the training length.
    """
    trained = training_length(network, "probe")
    longest = length or 2 * trained
    if longest <= trained or longest % trained:
        raise UserError(f"length: got {longest}, expected a multiple of {trained}, the training length, above it")
    gap, tokens = GapCurve(), 2 * blocks * longest
    many: Any = {"blocks": blocks, "blocks_per_document": 1}
    perplexity: Any = partial(Extrapolation, [trained, longest], documents=True, **many)
    last = perplexity(["last"], k=max(1, min(256, trained // 2)))
    plan: list[tuple[str, Measure, str | None, int]] = [
        ("gap", gap, None, gap.blocks * (gap.context + gap.k) * len(gap.readings(network))),
        ("window", perplexity(["full", "per_position"]), None, tokens),
        ("window", FarContext([longest], **many), None, 3 * blocks * longest),
        *(("scalings", last, name, tokens) for name in (None, "pi", "ntk", "yarn")),
    ]  # part, measure, scaling of RoPE, tokens
    plan = [entry for entry in plan if entry[0] in parts]
    for _, measure, _, _ in plan:
        measure.check(network, text)
    seconds = sum(tokens for *_, tokens in plan) * _seconds(network, text)
    print(f"{', '.join(parts)}: at least {duration(seconds)}", flush=True)
    runner, results = Runner(progress=Progress(every=5).over), []
    for part, measure, scaling, _ in plan:
        with nullcontext() if scaling is None else _scaled_rope(network, scaling, longest / trained, trained):
            results.append(measure.run(network, text, runner))
        results[-1].name = part if scaling is None else f"{part}: RoPE scaled by {scaling}"
    return results


@torch.inference_mode()
def _seconds(network: Any, text: Text) -> float:
    """Seconds for a token of a short text."""
    tokens = torch.as_tensor(text.stream.read(0, 257).astype("int64"))[None]
    began = time.monotonic()
    network.losses(tokens)
    return (time.monotonic() - began) / tokens.shape[1]


@contextmanager
def _scaled_rope(network: Any, scaling: Any, factor: float, length: int) -> Iterator[None]:
    """Replace the module that computes the angles of a model by one that is scaled, within the context."""
    base: Any = getattr(getattr(network, "model", None), "base_model", None)
    if not hasattr(base, "rotary_emb"):
        raise UserError(f"scalings: {network.name} has no module of transformers for RoPE; leave scalings out")
    own, config = base.rotary_emb, scaled(network.model.config, scaling, factor, length)
    try:
        base.rotary_emb = type(own)(config).to(network.model.device)
        yield
    finally:
        base.rotary_emb = own
