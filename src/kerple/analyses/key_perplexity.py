"""`LongPerplexity`: perplexity of the tokens for which far context matters (Fang et al. 2024)."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from pytorch_lightning import LightningModule, Trainer
from tokenizers import Tokenizer
from torch import Tensor

from kerple.analyses.key_tokens import Criterion, byte_spans, carried_over, key_targets, spelling
from kerple.base.atomic import write
from kerple.base.errors import UserError
from kerple.data.tokenizer import load_tokenizer, uncut
from kerple.evaluation.analysis import Analysis, log_directory, synchronise
from kerple.evaluation.metrics import TokenLoss
from kerple.evaluation.options import checked_lengths
from kerple.evaluation.protocols import full
from kerple.evaluation.results import finite, reach
from kerple.evaluation.typed import data_of, network_of


class LongPerplexity(Analysis):
    """Measures LongPPL (Fang et al. 2024, arXiv 2410.23771): perplexity of the key tokens, which need far context.

    A fixed pretrained model, the evaluator, chooses them. It reads each block once as a whole and once with a short
    context. A target is a key token if the far context raises its log-probability by more than ``gain``, to more than
    ``likely``. The choice depends on the text and the evaluator alone, and is kept in ``keys`` as
    ``keys-<hash>.json``, so that every model is scored on the same targets. If the model has another tokenizer than the
    evaluator, its key tokens are those that share a byte with one of the evaluator's.

    Writes ``longppl.json``, which has a row of the protocol ``longppl`` for each length, as `Extrapolation` writes
    them.

    Args:
        lengths: Evaluation lengths in tokens; each must divide the longest, which the evaluator reads as a block.
        short: Tokens in the evaluator's short context; the paper takes 4,096 for texts of 32,768.
        stride: Tokens by which the short context moves; the paper takes 1,024.
        blocks: Number of blocks of the test split.
        evaluator: A pretrained model: a folder, a GGUF file or a name; ``smollm2-135m`` is the name of a packaged one.
        gain: Least rise of a key token's log-probability, in nats.
        likely: Least log-probability of a key token with the whole context, in nats.
        keys: Folder in which the choice is kept. A checkpoint does not choose it.

    Raises:
        UserError: If an option is out of range, or the evaluator cannot be loaded or cannot read such long blocks.
    """

    name = "longppl"

    def __init__(
        self,
        lengths: Sequence[int],
        short: int,
        stride: int,
        blocks: int = 4,
        evaluator: str = "smollm2-135m",
        gain: float = 2.0,
        likely: float = -2.0,
        keys: str = "data/.keys",
    ) -> None:
        self.lengths = checked_lengths(lengths)
        super().__init__(self.lengths[-1], blocks)
        self.criterion = Criterion(short, stride, gain, likely)
        self.evaluator, self.keys = evaluator, keys
        if short >= self.lengths[-1]:
            raise UserError(f"LongPerplexity: short: got {short}, expected less than {self.lengths[-1]}, the longest")

    def impossible(self, pl_module: LightningModule) -> str | None:
        return None  # `analyse` leaves out the lengths that are too long

    def analyse(self, trainer: Trainer, pl_module: LightningModule) -> None:
        keys = self._keys(trainer)
        network, bound = network_of(pl_module), reach(network_of(pl_module))
        within = [length for length in self.lengths if bound is None or length <= bound]
        sums = {length: TokenLoss(self.blocks).to(pl_module.device) for length in within}
        for i, tokens in self.read(trainer, pl_module):
            chosen = torch.tensor(keys[i], dtype=torch.int64, device=tokens.device)
            for length, loss in sums.items():
                with trainer.precision_plugin.forward_context():
                    loss.update(full(network, tokens, length)[0, chosen], i)
        synchronise(*sums.values())
        directory = log_directory(trainer)
        if trainer.is_global_zero:
            rows = [_row(length, loss) for length, loss in sums.items()]
            skipped = [
                {"protocol": "longppl", "length": length, "reason": f"the strategy has only {bound} positions"}
                for length in self.lengths
                if length not in sums
            ]
            content = {"split": "test", "block": self.lengths[-1], **self._about(), "rows": rows, "skipped": skipped}
            (directory / "longppl.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            for row in rows:
                print(f"longppl at {row['length']:,}: {row['ppl']:.3f} over {row['targets']:,} key tokens")

    def _about(self) -> dict[str, Any]:
        return {"evaluator": self.evaluator, **asdict(self.criterion)}

    def _keys(self, trainer: Trainer) -> list[list[int]]:
        """Indices of the key targets in each block, from the file of an earlier test, or chosen and written to it."""
        from kerple.hf.source import locate, source_digest  # needs optional packages

        data = data_of(trainer)
        if not hasattr(data, "folder"):
            raise UserError(
                f"LongPerplexity: got data {type(data).__name__}, expected shards, by whose checksums the key tokens "
                "are kept; use data TokenShards"
            )
        source = locate(self.evaluator)
        about = {
            "evaluator": source_digest(source),
            "text": data.manifest.splits["test"].sha256,
            "tokenizer": data.manifest.tokenizer,
            "block": self.lengths[-1],
            "blocks": self.blocks,
            **asdict(self.criterion),
        }
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        path = Path(self.keys) / f"keys-{digest[:16]}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            if not path.exists():
                write(path, json.dumps({"about": about, "keys": self._choose(data, source)}))
        keys = _checked(path, about, self.blocks, self.lengths[-1])
        if not any(keys):
            raise UserError(
                f"LongPerplexity: blocks: got {self.blocks} of {self.lengths[-1]} tokens, in which {self.evaluator} "
                "finds no key token; read more, or a shorter short context"
            )
        return keys

    def _choose(self, data: Any, source: Any) -> list[list[int]]:
        from kerple.hf.adapter import HuggingFaceNetwork
        from kerple.hf.source import digest, read_model, read_model_config, read_tokenizer

        network = HuggingFaceNetwork(read_model(source, read_model_config(source)))
        tokenizer = read_tokenizer(source)
        same = digest(tokenizer) == data.manifest.tokenizer
        chosen = []
        for i in range(self.blocks):
            tokens = data.blocks("test", self.lengths[-1], self.blocks)[i]["tokens"]
            keys = self._judged(network, tokens) if same else self._through_text(network, tokenizer, data, tokens)
            chosen.append([place for place, key in enumerate(keys) if key])
        return chosen

    def _through_text(self, network: Any, tokenizer: Any, data: Any, tokens: Tensor) -> list[bool]:
        spell = spelling(load_tokenizer(str(data.folder.directory)), data.manifest.end_of_text)
        own = [spell(token) for token in tokens.tolist()]
        text = b"".join(own).decode("utf-8", "surrogateescape")
        readable = text.encode("utf-8", "replace").decode()  # "?" for each byte that is not text, as many characters
        whole = uncut(Tokenizer.from_str(tokenizer.to_str()))  # a copy: this one is known by its JSON
        encoding = whole.encode(readable, add_special_tokens=False)
        keys = [False, *self._judged(network, torch.tensor(encoding.ids))]  # of each token; the first is no target
        return carried_over(own, byte_spans(text, encoding.offsets), keys)[1:]

    @torch.inference_mode()
    def _judged(self, network: Any, tokens: Tensor) -> list[bool]:
        if network.shape.length < len(tokens) - 1:
            raise UserError(
                f"LongPerplexity: lengths: got {self.lengths[-1]} tokens, which are {len(tokens) - 1} of the "
                f"evaluator, expected at most {network.shape.length}, its training length; choose shorter ones, or "
                "another evaluator"
            )
        return key_targets(network, tokens[None], self.criterion)[0].tolist()


def _row(length: int, loss: TokenLoss) -> dict[str, Any]:
    kept = loss.targets > 0  # a block may have no key token
    return {
        "protocol": "longppl",
        "length": length,
        "nll_sum": finite(loss.nll.sum()),
        "targets": int(loss.targets.sum()),
        "ppl": finite(loss.perplexity()),
        "block_nll": [finite(nll) for nll in loss.nll[kept]],
        "block_targets": loss.targets[kept].tolist(),
    }


def _checked(path: Path, about: dict[str, Any], blocks: int, length: int) -> list[list[int]]:
    """Read the indices of the key tokens from a file, and check them.

    Raises:
        UserError: The file is damaged, or was made for other text or settings.
    """
    try:
        content = json.loads(path.read_text())
        keys = content["keys"]
        sound = content["about"] == about and len(keys) == blocks
        sound = sound and all(isinstance(p, int) and 0 <= p < length for block in keys for p in block)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: is no file of key tokens ({error}); remove it, it is made again") from error
    if not sound:
        raise UserError(f"{path}: does not fit its name; remove it, it is made again")
    return keys
