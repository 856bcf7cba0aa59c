"""`LongPerplexity`: perplexity of the tokens for which far context matters (Fang et al. 2024, arXiv 2410.23771)."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from filelock import FileLock
from torch import Tensor

from kerple.base.atomic import write
from kerple.base.errors import UserError
from kerple.base.mapping import read_mapping
from kerple.data.text import Text
from kerple.measure.measure import Measure, fitting_lengths, known_training_length, require_positive
from kerple.measure.protocols import full, ordered_lengths, sliding
from kerple.measure.result import Result
from kerple.measure.results import Row
from kerple.measure.runner import Runner
from kerple.model.network import Network


def key_targets(
    evaluator: Network, tokens: Tensor, *, short: int, stride: int, gain: float = 2.0, likely: float = -2.0
) -> Tensor:
    """Whether each target of tokens (B, N+1) int64 is a key token for the evaluator; (B, N) bool.

    The first ``short`` targets have the same context in both readings and are never key tokens.

    Args:
        evaluator: The model that judges.
        tokens: (B, N+1) int64.
        short: Number of tokens in the short context, less than N.
        stride: Number of tokens by which the short context moves. It then holds at least short - stride tokens.
        gain: The whole context must raise a key token's log-probability by more than this, in nats.
        likely: With the whole context, the log-probability must be above this, in nats.
    """
    with_all = full(evaluator, tokens, tokens.shape[1] - 1)
    with_short = sliding(evaluator, tokens, short, stride=stride)
    is_key = (with_short - with_all > gain) & (-with_all > likely)
    is_key[:, :short] = False  # their contexts are equal, so a difference is rounding
    return is_key


@dataclass
class LongPerplexity(Measure):
    """Measures LongPPL: perplexity of the key tokens, which need far context.

    A fixed pretrained model, the evaluator, chooses them. It reads each block once as a whole and once with a short
    context. A target is a key token if the far context raises its log-probability by more than ``gain``, to more than
    ``likely``. The evaluator has the tokenizer of the text. Its choice depends only on the text and the evaluator, and
    is kept in ``keys`` as ``keys-<hash>.json``, so that every model is scored on the same targets.

    Writes results of the protocol ``longppl`` for each length.

    Args:
        lengths: Evaluation lengths in tokens; each must divide the longest, which the evaluator reads as a block.
        short: Tokens in the evaluator's short context; the paper uses 4,096 for texts of 32,768.
        stride: Tokens by which the short context moves; the paper uses 1,024.
        blocks: Number of blocks of the text.
        evaluator: A pretrained model: a folder, a GGUF file or a name; ``smollm2-135m`` is the name of a packaged one.
        gain: Smallest rise of a key token's log-probability, in nats.
        likely: Smallest log-probability of a key token with the whole context, in nats.
        keys: Folder in which the choice is stored. The value in a checkpoint is ignored.

    Raises:
        UserError: If an option is out of range, or the evaluator cannot be loaded, has another tokenizer, or cannot
            read such long blocks.
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
        self.lengths = ordered_lengths(self.lengths)
        require_positive(self, "blocks")
        if not 1 <= self.stride <= self.short < self.lengths[-1]:
            raise UserError(
                f"LongPerplexity: stride, short: got {self.stride}, {self.short}, expected ascending, below lengths"
            )

    @property
    def criterion(self) -> dict[str, Any]:
        """The options of `key_targets`."""
        return {"short": self.short, "stride": self.stride, "gain": self.gain, "likely": self.likely}

    def check(self, network: Network, text: Any) -> None:
        from kerple.hf.source import find_model, read_tokenizer, same_tokens  # needs optional packages

        super().check(network, text)
        text.blocks(self.lengths[-1], self.blocks)
        if not same_tokens(read_tokenizer(find_model(self.evaluator)), text.tokenizer):
            raise UserError(
                f"LongPerplexity: evaluator: got {self.evaluator}, expected a model with the tokenizer of {text.name}; "
                f"prepare the text with --data.tokenizer hf:{self.evaluator}"
            )

    def measure(self, network: Any, text: Text, runner: Runner) -> Result:
        keys, blocks = self._keys(text), text.blocks(self.lengths[-1], self.blocks)
        fitting, skipped = fitting_lengths(self.lengths, network, self.name)
        losses = {length: runner.losses(len(keys)) for length in fitting}
        for i, tokens in runner.blocks(blocks):
            for length, loss in losses.items():
                with runner.autocast():
                    loss.update(full(network, tokens, length)[0, keys[i]], i)
        runner.synchronise(*losses.values())
        rows = [
            Row("ppl", self.name, length, None, block, nats, targets)
            for length, loss in losses.items()
            for block, (nats, targets) in enumerate(zip(loss.nll.tolist(), loss.targets.tolist(), strict=True))
            if targets  # a block may have no key token
        ]
        about = {"split": text.split, "block": self.lengths[-1], "evaluator": self.evaluator, "skipped": skipped}
        lines = [
            f"longppl at {n:,}: {float(loss.perplexity()):.3f} over {int(loss.targets.sum()):,} key tokens"
            for n, loss in losses.items()
        ]
        return Result(self.name, sums=rows, about=about | self.criterion, report="\n".join(lines))

    def _keys(self, text: Text) -> list[list[int]]:
        """Indices of the key targets in each block, from the file of an earlier test, or chosen and written to it."""
        from kerple.hf.source import find_model, source_digest  # needs optional packages

        source = find_model(self.evaluator)
        about = {
            "evaluator": source_digest(source),
            "text": text.digest,
            "tokenizer": hashlib.sha256(text.tokenizer.to_str().encode()).hexdigest(),
            "block": self.lengths[-1],
            "blocks": self.blocks,
            **self.criterion,
        }
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        path = Path(self.keys) / f"keys-{digest[:16]}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            if not path.exists():
                write(path, json.dumps({"about": about, "keys": self._choose(text, source)}))
        keys = read_mapping(path)["keys"]
        if not any(keys):
            raise UserError(f"LongPerplexity: blocks: got {self.blocks}, in which {self.evaluator} finds no key token")
        return keys

    def _choose(self, text: Text, source: Any) -> list[list[int]]:
        from kerple.hf.adapter import hugging_face_network
        from kerple.hf.source import bos_token, read_model, read_model_config

        network = hugging_face_network(read_model(source, read_model_config(source)), bos=bos_token(source))
        limit = known_training_length(network, "LongPerplexity: evaluator: training length")
        if limit < self.lengths[-1]:
            raise UserError(
                f"LongPerplexity: lengths: got {self.lengths[-1]}, expected at most {limit}, the training length of "
                f"{self.evaluator}; choose shorter ones"
            )
        blocks = text.blocks(self.lengths[-1], self.blocks)
        return [key_targets(network, tokens[None], **self.criterion)[0].nonzero()[:, 0].tolist() for tokens in blocks]
