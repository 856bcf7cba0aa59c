"""`LongPerplexity`: perplexity of the tokens for which far context matters (Fang et al. 2024, arXiv 2410.23771)."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from filelock import FileLock
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from kerple.base.atomic import write
from kerple.base.errors import require
from kerple.config.files import read_mapping
from kerple.data.evaluation_text import Text
from kerple.data.tokenizer import without_truncation
from kerple.measure.measure import (
    Measure,
    length_limit,
    ordered_lengths,
    require_positive,
    skipped_lengths,
    skipped_lines,
)
from kerple.measure.protocols import full, sliding
from kerple.measure.result import Result
from kerple.measure.runner import Runner
from kerple.model.network import Network

LETTERS = set(ByteLevel.alphabet())  # a printable Latin-1 character stands for its byte
OTHER_BYTES = [byte for byte in range(256) if chr(byte) not in LETTERS]  # U+0100 and later stand for these, in order
ALPHABET = {letter: ord(letter) if ord(letter) < 256 else OTHER_BYTES[ord(letter) - 256] for letter in LETTERS}
"""The byte of each character in the tokens of a byte-level tokenizer (Radford et al. 2019)."""


def key_targets(evaluator: Network, tokens: Tensor, *, short: int, stride: int, gain: float, likely: float) -> Tensor:
    """Return whether each target is a key token of the evaluator, (B, N) bool.

    A key token is a target that is likely in the whole context, and less likely in a short one. For the first ``short``
    targets, the two contexts are equal, so these are never key tokens.

    Args:
        evaluator: The model that chooses key tokens.
        tokens: Blocks of text, (B, N+1) int64.
        short: Number of tokens in the short context, less than N.
        stride: Number of tokens by which the short context moves. For every target except the first ``short``
            targets, the short context has more than ``short - stride`` tokens.
        gain: A key token's log-probability with the whole context exceeds that with the short one by more than this, in
            nats.
        likely: A key token's log-probability with the whole context is more than this, in nats.
    """
    whole_losses = full(evaluator, tokens, tokens.shape[1] - 1)
    short_losses = sliding(evaluator, tokens, short, stride=stride)
    is_key = (short_losses - whole_losses > gain) & (-whole_losses > likely)
    is_key[:, :short] = False  # the contexts are equal, so a difference is a rounding error
    return is_key


def translate_keys(sizes: Sequence[int], spans: Sequence[tuple[int, int]], is_key: Sequence[bool]) -> list[bool]:
    """Find the key tokens of another tokenisation: the tokens that share a byte with a key token of the evaluator.

    Args:
        sizes: Number of bytes of each token of the other tokenisation.
        spans: Pair (start, end) of each token of the evaluator, which has the bytes start..end - 1 of the text.
        is_key: Whether each token of the evaluator is a key token.

    Returns:
        Whether each token of the other tokenisation is a key token.
    """
    key_bytes = np.zeros(sum(sizes), dtype=bool)
    for (start, end), key in zip(spans, is_key, strict=True):
        key_bytes[start:end] |= key  # not =, because tokens that are parts of the same character have the same span
    return [bool(token.any()) for token in np.split(key_bytes, np.cumsum(sizes)[:-1])]


def token_spelling(tokenizer: Tokenizer, token: int, end_of_text: int) -> bytes:
    """Return the bytes of a token of a byte-level tokenizer. The token ``end_of_text`` has none.

    Raises:
        UserError: If the bytes of the token are not known, as in tokenizers that are not byte-level.
    """
    if token == end_of_text:
        return b""
    text = tokenizer.id_to_token(token) or ""
    expected = "known bytes; use a byte-level tokenizer, or that of LongPerplexity's evaluator"
    known = bool(text) and ALPHABET.keys() >= set(text)
    require(known, "data.tokenizer", f"the token {token} ({text!r})", expected)
    return bytes(ALPHABET[letter] for letter in text)


def byte_spans(text: str, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Convert spans (start, end) of a text's characters to spans of its UTF-8 bytes.

    A byte that is not part of a character is a lone surrogate in the text (``surrogateescape``).
    """
    offsets = list(accumulate((len(c.encode("utf-8", "surrogateescape")) for c in text), initial=0))
    return [(offsets[start], offsets[end]) for start, end in spans]


@dataclass
class LongPerplexity(Measure):
    """Measures LongPPL: perplexity of the key tokens, the targets that need far context.

    A pretrained model, the evaluator, chooses the key tokens. It reads each block as a whole and with a short context.
    A target is a key token if its log-probability with the whole context is above ``likely``, and exceeds that with the
    short context by more than ``gain``. If the tokenizers of model and evaluator differ, the model's key tokens are the
    tokens that share a byte with a key token of the evaluator.

    The key tokens depend on the text's tokens, the evaluator and the options, but not on the measured model. They are
    stored as ``keys-<hash>.json`` and used for every model. In the table of results, the column ``protocol`` is
    ``longppl``.

    Args:
        lengths: Evaluation lengths in tokens; each must divide the longest, which is the length of a block.
        short: Number of tokens in the short context; the paper uses 4,096 for texts of 32,768.
        stride: Number of tokens by which the short context moves; the paper uses 1,024.
        blocks: Number of blocks, from the beginning of the text.
        evaluator: A pretrained model: a folder, a GGUF file, a name on the Hugging Face hub, or ``smollm2-135m``.
        gain: Lower bound of the rise of a key token's log-probability, in nats.
        likely: Lower bound of the log-probability of a key token with the whole context, in nats.
        keys: Folder in which the key tokens are stored. The folder in a checkpoint's configuration is ignored, because
            a checkpoint must not determine where files are written.

    Raises:
        UserError: If an option is out of range, the evaluator cannot be loaded or cannot read such long blocks, or the
            text has no key tokens.
    """

    lengths: Sequence[int]
    short: int
    stride: int
    blocks: int = 4
    evaluator: str = "smollm2-135m"
    gain: float = 2.0
    likely: float = -2.0
    keys: str = "data/.keys"

    name: ClassVar[str] = "longppl"

    def __post_init__(self) -> None:
        self.lengths = ordered_lengths(self, dividing=True)
        require_positive(self, "blocks")
        given, longest = f"stride {self.stride} and short {self.short}", self.lengths[-1]
        expected = f"1 <= stride <= short < {longest}, the longest of lengths"
        require(1 <= self.stride <= self.short < longest, "LongPerplexity", given, expected)

    @property
    def criterion(self) -> dict[str, Any]:
        """Options of `key_targets`."""
        return {"short": self.short, "stride": self.stride, "gain": self.gain, "likely": self.likely}

    def check(self, network: Network, text: Any) -> None:
        super().check(network, text)
        text.blocks(self.lengths[-1], self.blocks)
        _ = text.tokenizer  # raises an error if the text has none

    def measure(self, network: Any, text: Text, runner: Runner) -> Result:
        keys = self._keys(text)
        blocks = text.blocks(self.lengths[-1], self.blocks)
        lengths = [length for length in self.lengths if length <= length_limit(network)]
        losses = {length: runner.losses(len(keys)) for length in lengths}
        for i, tokens in runner.blocks(blocks):
            documents = blocks.document_options(i, runner.device)
            for length, loss in losses.items():
                with runner.autocast():
                    loss.update(full(network, tokens, length, **documents)[0, keys[i]], i)
        runner.synchronise(*losses.values())
        rows = [row for length, loss in losses.items() for row in loss.rows(self.name, length)]
        about: dict[str, Any] = {"split": text.split, "block": self.lengths[-1], "evaluator": self.evaluator}
        about["skipped"] = skipped_lengths(self.lengths, network, self.name)
        lines = [
            f"longppl at {length:,}: {float(loss.perplexity()):.3f} over {int(loss.targets.sum()):,} key tokens"
            for length, loss in losses.items()
        ]
        report = "\n".join([*lines, *skipped_lines(about["skipped"])])
        return Result(self.name, sums=rows, about=about | self.criterion, report=report)

    def _keys(self, text: Text) -> list[list[int]]:
        """Return the indices of the key tokens among each block's targets. The first call stores them in a file."""
        from kerple.hf.pretrained_files import find_model, source_digest  # needs optional packages

        source = find_model(self.evaluator)
        about: dict[str, Any] = {"evaluator": source_digest(source), "text": text.digest}
        about["tokenizer"] = hashlib.sha256(text.tokenizer.to_str().encode()).hexdigest()
        about |= {"block": self.lengths[-1], "blocks": self.blocks, **self.criterion}
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        path = Path(self.keys) / f"keys-{digest[:16]}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            if not path.exists():
                write(path, json.dumps({"about": about, "keys": self._choose(text, source)}))
        keys = read_mapping(path)["keys"]
        expected = f"more, because {self.evaluator} finds no key token in them; or decrease `gain` or `likely`"
        require(any(keys), "LongPerplexity: blocks", self.blocks, expected)
        return keys

    def _choose(self, text: Text, source: Any) -> list[list[int]]:
        """Return the key tokens that the evaluator, loaded from ``source``, chooses in each block, see `_keys`."""
        from kerple.hf.adapter import hugging_face_network  # needs optional packages
        from kerple.hf.pretrained_files import read_model, read_model_config
        from kerple.hf.pretrained_tokenizer import bos_token, read_tokenizer, same_tokens

        network = hugging_face_network(read_model(source, read_model_config(source)), bos=bos_token(source))
        tokenizer = read_tokenizer(source)
        same = same_tokens(tokenizer, text.tokenizer)
        is_key = self._is_key if same else partial(self._is_key_retokenised, tokenizer, text)
        blocks = text.blocks(self.lengths[-1], self.blocks)
        return [[i for i, key in enumerate(is_key(network, tokens)) if key] for tokens in blocks]

    def _is_key_retokenised(self, tokenizer: Any, text: Text, network: Network, tokens: Tensor) -> list[bool]:
        """Return whether each target is a key token, for an evaluator with another tokenizer than that of the text.

        Args:
            tokenizer: The evaluator's tokenizer.
            text: The text.
            network: The evaluator.
            tokens: Tokens of a block of the text, (N+1,) int64.
        """
        spelling = [token_spelling(text.tokenizer, token, text.end_of_text) for token in tokens.tolist()]
        whole_text = b"".join(spelling).decode("utf-8", "surrogateescape")
        # "?" replaces each byte that is not part of a character, so that the number of characters stays the same
        readable = whole_text.encode("utf-8", "replace").decode()
        copy = without_truncation(Tokenizer.from_str(tokenizer.to_str()))  # changes the settings of the copy only
        encoding = copy.encode(readable, add_special_tokens=False)
        is_key = [False, *self._is_key(network, torch.tensor(encoding.ids))]  # of each token; the first is no target
        return translate_keys([*map(len, spelling)], byte_spans(whole_text, encoding.offsets), is_key)[1:]

    def _is_key(self, network: Network, tokens: Tensor) -> list[bool]:
        """Return whether each target is a key token, for tokens (N+1,) int64 of the evaluator's tokenizer."""
        if len(tokens) - 1 <= self.short:  # in this tokenizer; the two contexts are equal, so there is no key token
            return [False] * (len(tokens) - 1)
        limit, expected = network.training_length or 0, "one whose configuration states its training length"
        require(limit > 0, "LongPerplexity: evaluator", self.evaluator, expected)
        given = f"{self.lengths[-1]} tokens, or {len(tokens) - 1} with the tokenizer of {self.evaluator}"
        expected = f"at most the evaluator's training length, {limit}; use shorter lengths or another evaluator"
        require(len(tokens) - 1 <= limit, "LongPerplexity: lengths", given, expected)
        return key_targets(network, tokens[None], **self.criterion)[0].tolist()
