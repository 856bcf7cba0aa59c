"""`TokenShards`: the data module of language modelling on token shards."""

import hashlib
from functools import cached_property
from typing import Any

from pytorch_lightning import LightningDataModule
from pytorch_lightning.trainer.states import TrainerFn

from kerple.base.errors import UserError
from kerple.data.loader import BatchLoader, BlockBatches, EvaluationLoader, TrainingBatches, rank_in
from kerple.data.manifest import SPLITS, Manifest
from kerple.data.options import ShardOptions
from kerple.data.order import Order
from kerple.data.prepare.build import check_prepared, prepare
from kerple.data.shards import Folder
from kerple.data.text import ShardText, TextBlocks


class TokenShards(ShardOptions, LightningDataModule):
    """Language modelling data in token shards, which are prepared on first use. `ShardOptions` has the options.

    Documents are concatenated, each followed by an end-of-text token, which is also a target. Attention is not reset
    between documents, as in the paper. A training sample is `length` + 1 consecutive tokens. Samples are shuffled over
    the whole corpus. Sample k depends only on `seed` and k, not on the number of devices, workers or accumulation
    steps.

    An epoch of the training loader is the whole run: `trainer.max_steps` steps, or the training split once if
    `max_steps` is not set. The option `samples` limits an epoch to this number of samples, the same in every epoch.
    """

    reads_only: bool = False
    """Whether missing shards are an error instead of being prepared. `test` and `predict` set it, because a checkpoint
    determines their options, and it must not cause files to be written."""

    def prepare_data(self) -> None:
        """Prepare the shards unless they exist; an interrupted preparation is continued."""
        if self.corpus is not None:
            _ = check_prepared(self) if self.reads_only else prepare(self)

    def setup(self, stage: str | None = None) -> None:
        """Open the folder of the shards and read its manifest.

        Raises:
            UserError: The manifest cannot be used, or its vocabulary is larger than `vocabulary`.
        """
        _ = self.folder

    @cached_property
    def folder(self) -> Folder:
        """The folder of the shards."""
        folder = Folder(self.location)
        if folder.manifest.vocabulary > self.vocabulary:
            given = f"got {self.vocabulary}, but {self.location} has {folder.manifest.vocabulary}"
            raise UserError(f"data.vocabulary: {given}; use at least as many")
        return folder

    @property
    def manifest(self) -> Manifest:
        """The manifest of the folder of the shards."""
        return self.folder.manifest

    def checksum(self) -> str:
        """A sha256 of the tokenizer and the tokens of each split.

        It is computed from one line, "tokenizer split tokens", for each split. Tokenizer and tokens are checksums in
        the manifest. The result depends neither on the path of the folder nor on the division into shards.
        """
        lines = [f"{self.manifest.tokenizer} {name} {self.manifest.splits[name].sha256}\n" for name in SPLITS]
        # twice, as in records of earlier versions, which could train on other folders than they tested on
        return hashlib.sha256("".join(lines * 2).encode()).hexdigest()

    def state_dict(self) -> dict[str, str]:
        """Checksums of the tokenizer and of the training data, for the checkpoint of a fit."""
        return {"tokenizer": self.manifest.tokenizer, "training": self._training_checksum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Compare the checksums of a checkpoint with those of these shards.

        Raises:
            UserError: The tokenizer differs, or a fit is resumed with other training data.
        """
        state = state if isinstance(state, dict) else {}  # a damaged checkpoint may have anything here
        if state.get("tokenizer", self.manifest.tokenizer) != self.manifest.tokenizer:
            raise UserError(
                f"data.directory: got {self.location}, expected the tokenizer of the checkpoint; use its data"
            )
        fitting = self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
        if fitting and state.get("training", self._training_checksum) != self._training_checksum:
            raise UserError(
                f"data.directory: got {self.location}, expected the training tokens of the fit; or use --weights"
            )

    def train_dataloader(self) -> BatchLoader:
        """Training batches of this rank, {"tokens": (B, T + 1) int64}, for the whole run.

        Raises:
            UserError: The corpus is too small for a batch.
        """
        stream = self.folder.stream("train")
        order = Order(len(stream), self.length, self.seed, 0)  # 0: the key of earlier versions
        rank, ranks = rank_in(self)
        samples = self.batch_size * ranks  # of all ranks
        batches = self._batches(order.samples, samples)
        dataset = TrainingBatches(stream, order, self.batch_size, batches, rank, ranks)
        return BatchLoader(dataset, samples, self.workers, self._pin_memory())

    def val_dataloader(self) -> EvaluationLoader:
        """Batches of the first segments of `length` targets of the validation split.

        A batch is {"tokens": (B, T + 1) int64, "index": (B,) int64, "scored": (B, T) bool}; "scored" is False in rows
        that only pad the last batch.
        """
        blocks = self.blocks("validation", self.length, self.validation_segments)
        batches = BlockBatches(blocks, min(self.batch_size, max(len(blocks), 1)), *rank_in(self))
        return EvaluationLoader(batches, self._pin_memory())

    def test_dataloader(self) -> EvaluationLoader:
        """One batch of one block of the test split for each rank, because Lightning skips a test without batches.

        Callbacks that measure on text do not use these batches. They read the split through `text`.
        """
        rank, ranks = rank_in(self)
        return EvaluationLoader(BlockBatches(self.blocks("test", self.length, ranks), 1, rank, ranks))

    def blocks(self, split: str, length: int, limit: int | None = None) -> TextBlocks:
        """Disjoint blocks of `length` targets of a split, at most `limit`; errors as of `Text.blocks`."""
        return self.text(split).blocks(length, limit, fewer=True)

    def text(self, split: str) -> ShardText:
        """The text of a split, for measures; the same object in every call."""
        return self._texts[split]

    @cached_property
    def _texts(self) -> dict[str, ShardText]:
        return {split: ShardText(self.folder, split) for split in SPLITS}

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without an end-of-text token."""
        return self.text("train").encode(text)

    def decode(self, tokens: list[int]) -> str:
        """The text of token ids; an end-of-text token becomes its name."""
        return self.text("train").decode(tokens)

    @property
    def _training_checksum(self) -> str:
        """A sha256 of the checksum of the training tokens, in the form that checkpoints have."""
        return hashlib.sha256(repr([self.manifest.splits["train"].sha256]).encode()).hexdigest()

    def _batches(self, samples_in_corpus: int, samples: int) -> int:
        """Number of micro-batches in an epoch, of ``samples`` samples each."""
        trainer, available = self.trainer, self.samples or samples_in_corpus
        if self.samples is None and trainer is not None and trainer.max_steps > 0:
            return trainer.max_steps * trainer.accumulate_grad_batches
        if available < samples:
            given = f"got {self.batch_size}, {samples} samples on all devices, but there are only {available}"
            raise UserError(f"data.batch_size: {given}; use a smaller batch_size or length, or a larger corpus")
        return available // samples

    def _pin_memory(self) -> bool:
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
