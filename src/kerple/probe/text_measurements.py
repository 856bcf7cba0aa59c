"""The measurements of `probe` on text: gaps in the positions, and perplexity beyond the training length."""

import time
from dataclasses import replace
from typing import Any

import torch

from kerple.base.errors import require
from kerple.base.run_progress import Progress, duration
from kerple.data.evaluation_text import Text
from kerple.data.prepare.corpora import find_corpus
from kerple.data.prepare.readers import Document
from kerple.data.shard_options import ShardOptions
from kerple.measure.extrapolation import Extrapolation
from kerple.measure.far_context import FarContext
from kerple.measure.gap import GapCurve
from kerple.measure.measure import Measure, known_training_length, length_limit
from kerple.measure.result import Result
from kerple.measure.runner import Runner

TextMeasure = tuple[str, Measure, int]
"""Part of `text_measures`, measurement, and number of tokens that the measurement reads."""


def corpus_text(corpus: str, tokenizer: Any, source: str = "") -> Text:
    """Return the documents of a corpus (see `ShardOptions`), encoded by a `tokenizers.Tokenizer` from ``source``."""
    documents = (d.text for d in find_corpus(ShardOptions(corpus)).documents() if isinstance(d, Document))
    return Text.of_strings(documents, tokenizer, f"the corpus {corpus}", source)


def first_tokens(corpus: str, length: int, tokenizers: list[Any]) -> list[torch.Tensor]:
    """Return the first tokens of a corpus, (length,) int64 or fewer, from each `tokenizers.Tokenizer`.

    Raises:
        UserError: The corpus is unknown or cannot be read.
    """
    ids: list[list[int]] = [[] for _ in tokenizers]
    for document in find_corpus(ShardOptions(corpus)).documents():
        for found, tokenizer in zip(ids, tokenizers, strict=True):
            found += tokenizer.encode(document.text).ids if isinstance(document, Document) else []
        if min(map(len, ids)) >= length:
            break
    return [torch.tensor(found[:length], dtype=torch.int64) for found in ids]


def text_measures(network: Any, text: Text, parts: list[str], length: int | None, blocks: int) -> list[TextMeasure]:
    """Return the measurements of some parts, after checking their options.

    Args:
        network: A `kerple.model.network.Network`.
        text: The text.
        parts: ``gap`` for gaps in the positions (`GapCurve`), ``far_context`` for perplexity beyond the training length
            (`Extrapolation` and `FarContext`), or both.
        length: Evaluation length of ``far_context`` in tokens: 2, 3, … times the training length; None for 2 times.
        blocks: Number of documents that ``far_context`` reads. It reads one block of each document.

    Raises:
        UserError: If the text is too short, ``length`` is not 2, 3, … times the training length, or the training length
            is not known.
    """
    training_length = known_training_length(network, "length")
    longest = 2 * training_length if length is None else length
    valid = longest > training_length and longest % training_length == 0
    require(valid, "length", longest, f"2, 3, … times the training length, {training_length}")
    half = max(training_length // 2, 1)  # without a gap, inputs are then not longer than in training
    gap = GapCurve(context=min(256, half), k=min(64, half))
    sample: Any = {"blocks": blocks, "blocks_per_document": 1}
    perplexity = Extrapolation([training_length, longest], ["full", "per_position"], documents=True, **sample)
    measures: list[TextMeasure] = []
    if "gap" in parts:
        measures.append(("gap", gap, gap.blocks * (gap.context + gap.k) * len(gap.fitting_gaps(network))))
    if "far_context" in parts:
        measures.append(("far_context", perplexity, 2 * blocks * longest))
        measures.append(("far_context", FarContext([longest], **sample), 3 * blocks * longest))
    for _, measure, _ in measures:
        measure.check(network, text)
    return measures


def measure_on_text(network: Any, text: Text, measures: list[TextMeasure]) -> list[Result]:
    """Print a lower bound of the time that `text_measures` take, then make them and return their results."""
    seconds = sum(tokens for *_, tokens in measures) * _seconds_per_token(network, text)
    print(f"{', '.join(dict.fromkeys(part for part, *_ in measures))}: at least {duration(seconds)}", flush=True)
    runner = Runner(progress=Progress(every=5).count)
    return [replace(measure.run(network, text, runner), name=part) for part, measure, _ in measures]


@torch.inference_mode()
def _seconds_per_token(network: Any, text: Text) -> float:
    """Return the seconds per token, measured with one input of 256 tokens, or of fewer if the network reads fewer."""
    inputs = int(min(256, length_limit(network)))
    tokens = torch.as_tensor(text.stream[: inputs + 1].astype("int64"))[None]
    start = time.monotonic()
    network.losses(tokens)
    return (time.monotonic() - start) / tokens.shape[1]
