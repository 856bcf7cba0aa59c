"""`TokenShards`: the data module of language modelling on token shards."""

import hashlib
import sys
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from pytorch_lightning import LightningDataModule
from pytorch_lightning.trainer.states import TrainerFn

from kerple.base.atomic import note_path
from kerple.base.errors import require
from kerple.data.documents import Documents
from kerple.data.evaluation_text import ShardText
from kerple.data.loader import BlockBatches, TrainingLoader, rank_and_world_size, read_samples
from kerple.data.manifest import SPLITS, Manifest
from kerple.data.order import Order, SectionOrder
from kerple.data.packing import PackedSamples
from kerple.data.prepare.build import check_prepared, prepare
from kerple.data.shard_options import ShardOptions
from kerple.data.shards import Folder, ShardFetcher, TokenStream
from kerple.model import Batch


class TokenShards(ShardOptions, LightningDataModule):
    """Data module for language modelling on token shards. Missing shards are prepared on first use.

    `ShardOptions` documents the arguments.

    Documents are concatenated. Each is followed by an end-of-text token, which is also a target. By default, as in the
    KERPLE paper, attention is not reset between documents. A training sample is `length` + 1 consecutive tokens, or
    contains whole documents (`packing`). Samples are shuffled over the whole training split, or over `sections` shards
    at a time. For given shards, sample k depends only on `length`, `seed`, `packing`, `sections` and k, not on the
    number of devices, workers or accumulation steps.

    The samples of a training epoch are

    - the first `samples` samples, if this option is set,
    - the samples of `trainer.max_steps` steps, if only `max_steps` is set; the run then has one epoch,
    - the samples of the training split, if neither is set.

    In the first and the last case, an incomplete batch is dropped, and every epoch has the same samples in the same
    order.
    """

    reads_only: bool = False
    """Whether missing shards are an error. If false, they are prepared. The command `test` sets it to true, because the
    options of `test` come from a checkpoint, and a checkpoint must not determine where files are written."""

    def prepare_data(self) -> None:
        """Prepare missing shards, or continue an interrupted preparation. With `reads_only`, only check the shards."""
        if self.corpus is not None:
            _ = check_prepared(self) if self.reads_only else prepare(self)

    def setup(self, stage: str | None = None) -> None:
        """Open the folder of the shards and read its manifest.

        Raises:
            UserError: The manifest is missing or damaged, or its vocabulary is larger than `vocabulary`.
        """
        _ = self.folder

    @cached_property
    def folder(self) -> Folder:
        """The folder of the shards."""
        folder = Folder(self.location, self.cache, self.cache_gb)
        smallest = folder.manifest.vocabulary
        expected = f"at least {smallest}, the vocabulary of the shards in {self.location}"
        require(self.vocabulary >= smallest, "data.vocabulary", self.vocabulary, expected)
        return folder

    @property
    def manifest(self) -> Manifest:
        """The manifest of the folder of the shards."""
        return self.folder.manifest

    def checksum(self) -> str:
        """Return a sha256 of the tokenizer and the tokens of all splits.

        The checksum depends neither on the path of the folder nor on the division of the tokens into shards. The hashed
        text has a line "tokenizer split tokens" for each split, where tokenizer and tokens are the checksums in the
        manifest. The same lines then follow once more, as in records of earlier versions.
        """
        lines = [f"{self.manifest.tokenizer} {name} {self.manifest.splits[name].sha256}\n" for name in SPLITS]
        # In earlier versions, training and test could use different folders, and the text had the lines of both. With
        # the lines of one folder twice, the checksum equals that in records of earlier versions.
        return hashlib.sha256("".join(lines * 2).encode()).hexdigest()

    def state_dict(self) -> dict[str, str]:
        """Return checksums of the tokenizer and of the training data, which Lightning stores in checkpoints."""
        return {"tokenizer": self.manifest.tokenizer, "training": self._training_checksum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Compare the checksums in a checkpoint with those of these shards. Missing checksums are not compared.

        Raises:
            UserError: The tokenizer differs, or a fit is resumed with other training tokens.
        """
        state = state if isinstance(state, dict) else {}  # a damaged checkpoint may have anything here
        same = state.get("tokenizer", self.manifest.tokenizer) == self.manifest.tokenizer
        expected = "shards with the tokenizer of the checkpoint; give the folder of the training data"
        require(same, "data.directory", self.location, expected)
        fitting = self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
        same = not fitting or state.get("training", self._training_checksum) == self._training_checksum
        expected = "the tokens on which the checkpoint was trained; give their folder, or use --weights"
        require(same, "data.directory", self.location, expected)

    def train_dataloader(self) -> TrainingLoader:
        """Return the loader of this rank's training batches, see `read_samples`.

        Raises:
            UserError: The training split has too few tokens for a sample, or an epoch too few samples for a batch.
        """
        # the shards of this section and the next one
        stream = TokenStream(self.folder, "train", self.sections and 2 * self.sections + 1)
        rank, world_size = rank_and_world_size(self)
        read: Callable[[Sequence[int]], Batch] = partial(read_samples, stream, self.length, self._documents("train"))
        order: Order | SectionOrder
        if self.packing == "best_fit":
            packed = self._packed_samples(stream)
            if rank == 0:
                print(f"{self.location}: {packed.summary}", file=sys.stderr)
            read, order = packed.read, Order(packed.samples + 1, 1, self.seed, 0)  # a sample in place of a token
        elif self.sections is None:
            order = Order(len(stream), self.length, self.seed, 0)  # the 0 keeps the order of earlier versions
        else:
            sizes = [shard.tokens for shard in stream.shards]
            order = SectionOrder(sizes, self.length, self.sections, self.seed)
        batch_samples, available = self.batch_size * world_size, self.samples or order.samples  # of all ranks
        if self.samples is None and self.trainer is not None and self.trainer.max_steps > 0:
            batches = self.trainer.max_steps * self.trainer.accumulate_grad_batches
        else:
            batches = available // batch_samples
            expected = f"at most {available} in all; decrease it or data.length, or use a larger corpus"
            require(batches >= 1, "data.batch_size", f"{self.batch_size} on each of {world_size} devices", expected)
        on_gpu = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        period = batches * batch_samples  # every epoch has the same samples
        loader = TrainingLoader(
            read, self.batch_size, batches, rank, world_size, self.workers, on_gpu, lambda k: order.starts(k % period)
        )
        if isinstance(order, SectionOrder):
            loader.arrange = lambda k: order.arrange(k % period)
            loader.ahead = -(-order.samples * order.lanes // len(order.counts) // batch_samples)
        if self.folder.remote and self.packing == "stream":
            loader.fetcher = partial(ShardFetcher, stream)
        return loader

    def val_dataloader(self) -> BlockBatches:
        """Return this rank's batches of the first `validation_segments` blocks of the validation split.

        A batch is {"tokens": (B, T + 1) int64, "index": (B,) int64, "scored": (B, T) bool} with T = `length` and B at
        most `batch_size`. "scored" is False in rows that only pad the last batch. With `mask_documents`, the batch also
        has "documents".
        """
        blocks = self.text("validation").blocks(self.length, self.validation_segments, fewer=True)
        rank, world_size = rank_and_world_size(self)
        documents = self._documents("validation")
        return BlockBatches(blocks, min(self.batch_size, len(blocks)), rank, world_size, documents)

    def test_dataloader(self) -> BlockBatches:
        """Return a loader of one test block for this rank, because Lightning skips a test without batches.

        Callbacks that measure a model on text do not use this block. They read the split through `text`.
        """
        rank, world_size = rank_and_world_size(self)
        return BlockBatches(self.text("test").blocks(self.length, world_size, fewer=True), 1, rank, world_size)

    def text(self, split: str) -> ShardText:
        """Return the text of a split, which callbacks of `kerple.measure` read. Every call returns the same object."""
        return self._texts[split]

    @cached_property
    def _texts(self) -> dict[str, ShardText]:
        return {split: ShardText(self.folder, split, self.mask_documents) for split in SPLITS}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a string, without an end-of-text token."""
        return self.text("train").encode(text)

    def decode(self, tokens: list[int]) -> str:
        """Return the string of token ids; an end-of-text token becomes its name."""
        return self.text("train").decode(tokens)

    def _documents(self, split: str) -> Documents | None:
        """Return the documents of a split, or None if training and validation do not use them."""
        if not self.mask_documents and self.score_first_targets:
            return None
        return Documents(self.folder.documents(split), self.mask_documents, self.score_first_targets)

    def _packed_samples(self, stream: TokenStream) -> PackedSamples:
        """Return the samples of the training split by best-fit packing."""
        documents = Documents(self.folder.documents("train"), self.mask_documents, self.score_first_targets)
        cache = note_path("packing", Path(self.location))
        return PackedSamples(stream, documents, self.manifest.end_of_text, self.length, self.seed, cache)

    @property
    def _training_checksum(self) -> str:
        """A sha256 of the checksum of the training tokens, in the format of existing checkpoints."""
        return hashlib.sha256(repr([self.manifest.splits["train"].sha256]).encode()).hexdigest()
