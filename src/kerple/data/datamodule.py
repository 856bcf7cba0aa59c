"""`TokenShards`: the data module of language modelling on token shards."""

import hashlib
import sys
from functools import cached_property, partial
from typing import Any

from pytorch_lightning import LightningDataModule
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.rank_zero import rank_zero_info

from kerple.base.errors import require
from kerple.data.documents import Documents
from kerple.data.evaluation_text import ShardText, TextBlocks
from kerple.data.loader import (
    READ,
    BlockBatches,
    TrainingLoader,
    batches_of_epoch,
    batches_of_run,
    rank_and_world_size,
    read_samples,
)
from kerple.data.manifest import SPLITS, Manifest
from kerple.data.mixture import Mixture, Part, Samples
from kerple.data.order import Order, SectionOrder
from kerple.data.packing import PackedSamples
from kerple.data.prepare.build import check_prepared, prepare
from kerple.data.remote_shards import is_url
from kerple.data.shard_options import ShardOptions
from kerple.data.shards import Folder, ShardFetcher, TokenStream


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
        """Open the folders of shards and read their manifests.

        Raises:
            UserError: A manifest is missing or damaged, a vocabulary is larger than `vocabulary`, or a part of the
                mixture was prepared with another tokenizer or end-of-text token, or other `split_fractions`, than the
                folder.
        """
        _ = self.folder
        if stage not in ("test", "predict"):  # which use only the folder
            _ = self.parts
        elif stage == "test" and self.mixture is not None:
            compared = f"only with the training text of {self.location}"
            rank_zero_info(f"warning: data.mixture: the overlaps of test documents are {compared}")

    @cached_property
    def folder(self) -> Folder:
        """The folder of the shards."""
        folder = Folder(self.location, self.cache, self.cache_gb)
        smallest = folder.manifest.vocabulary
        expected = f"at least {smallest}, the vocabulary of the shards in {self.location}"
        require(self.vocabulary >= smallest, "data.vocabulary", self.vocabulary, expected)
        return folder

    @cached_property
    def parts(self) -> list[Part]:
        """The parts of the training data: those of the mixture, or the folder of the shards."""
        if self.mixture is None:
            return [Part("", self.folder)]
        parts = [Part.open(name, self.cache, self.cache_gb) for name in self.mixture]
        for part in parts:
            tokenizer = f"the tokenizer.json in {self.location}" if is_url(self.location) else self.location
            advice = f"prepare it with --data.tokenizer {tokenizer}"
            same = part.folder.manifest.tokenizer == self.manifest.tokenizer
            expected = f"the tokenizer of {self.location}; {advice}"
            require(same, "data.mixture", f"{part.name} with another tokenizer", expected)
            ends = [folder.manifest.end_of_text for folder in (part.folder, self.folder)]
            given, expected = f"{part.name} with the end-of-text token {ends[0]}", f"{ends[1]}, as in {self.location}"
            require(ends[0] == ends[1], "data.mixture", given, f"{expected}; {advice}")
            # a hash of a document's text determines its split, so that with equal fractions no document for validation
            # of one part is in the training split of another
            fractions = [folder.manifest.settings.get("split_fractions") for folder in (part.folder, self.folder)]
            given = f"{part.name} with data.split_fractions {fractions[0]}"
            require(fractions[0] == fractions[1], "data.mixture", given, f"{fractions[1]}, as in {self.location}")
        return parts

    @property
    def manifest(self) -> Manifest:
        """The manifest of the folder of the shards."""
        return self.folder.manifest

    def checksum(self) -> str:
        """Return a sha256 of the tokenizer and the tokens of all splits.

        The checksum depends neither on the path of the folder nor on the division of the tokens into shards. The hashed
        text has a line "tokenizer split tokens" for each split, where tokenizer and tokens are the checksums in the
        manifest. The same lines for the parts of the mixture follow. Without a mixture, the lines of the folder follow
        once more, as in records of earlier versions.
        """
        folder = Part("", self.folder)
        # In earlier versions, training and test could use different folders, and the text had the lines of both. With
        # the lines of one folder twice, the checksum equals that in records of earlier versions.
        lines = [
            f"{part.folder.manifest.tokenizer} {name} {part.checksum(name)}\n"
            for part in (folder, *self.parts)
            for name in SPLITS
        ]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def state_dict(self) -> dict[str, str | int]:
        """Return checksums of the tokenizer and the training data, and the end-of-text token, for checkpoints.

        With `sections`, the order of the samples depends on the sizes of the shards, which have a checksum, too.
        """
        state: dict[str, str | int] = {"tokenizer": self.manifest.tokenizer, "training": self._training_checksum}
        state["end_of_text"] = self.manifest.end_of_text
        return state if self.sections is None else state | {"shards": self._shards_checksum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Compare the state in a checkpoint with that of these shards. Missing entries are not compared.

        Raises:
            UserError: The tokenizer or its end-of-text token differs, or a fit is resumed with other training tokens,
                or with `sections` and another division of these tokens into shards.
        """
        state = state if isinstance(state, dict) else {}  # a damaged checkpoint may have anything here
        same = state.get("tokenizer", self.manifest.tokenizer) == self.manifest.tokenizer
        same = same and state.get("end_of_text", self.manifest.end_of_text) == self.manifest.end_of_text
        expected = "shards with the tokenizer of the checkpoint; give the folder of the training data"
        require(same, "data.directory", self.location, expected)
        fitting = self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
        same = not fitting or state.get("training", self._training_checksum) == self._training_checksum
        expected = "the tokens on which the checkpoint was trained; give their folder, or use --weights"
        option, given = ("data.mixture", [*self.mixture]) if self.mixture else ("data.directory", self.location)
        require(same, option, given, expected)
        compared = fitting and self.sections is not None
        same = not compared or state.get("shards", self._shards_checksum) == self._shards_checksum
        expected = "the shards on which the checkpoint was trained, whose sizes determine the order with data.sections"
        require(same, option, given, f"{expected}; give their folder, or use --weights")

    def train_dataloader(self) -> TrainingLoader:
        """Return the loader of this rank's training batches, see `read_samples`.

        Raises:
            UserError: The training split has too few tokens for a sample, or an epoch too few samples for a batch.
        """
        rank, world_size = rank_and_world_size(self)
        parts = [self._samples(number, part) for number, part in enumerate(self.parts)]
        order: Order | SectionOrder | Mixture
        if self.mixture is None:
            read, order = parts[0].read, parts[0].order
        else:
            order = Mixture(parts, [round(1000 * weight) for weight in self.mixture.values()], self.seed)
            read = order.read
        batch_samples, available = self.batch_size * world_size, self.samples or order.samples  # of all ranks
        repeats = True
        if self.samples is None and self.trainer is not None and self.trainer.max_steps > 0:
            batches, repeats = batches_of_run(self.trainer), False  # the run has one epoch
        else:
            batches = available // batch_samples
            advice = "increase data.samples" if self.samples else "decrease data.length, or use a larger corpus"
            expected = f"at most {available} in all; decrease it, or {advice}"
            require(batches >= 1, "data.batch_size", f"{self.batch_size} on each of {world_size} devices", expected)
        period = batches * batch_samples  # every epoch has the same samples
        expected = f"at most {order.samples}, after which a part of the mixture ends, or data.repeat_parts: true"
        enough = self.repeat_parts or self.mixture is None or period <= order.samples
        require(enough, "data.mixture", f"a training with {period} samples", expected)
        on_gpu = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        place = (lambda k: k % period) if repeats else (lambda k: k)
        loader = TrainingLoader(
            read, self.batch_size, batches, rank, world_size, self.workers, on_gpu, lambda k: order.starts(place(k))
        )
        if self.sections is not None:
            assert not isinstance(order, Order)
            loader.lane = lambda k: order.lane(place(k))
            loader.ahead = -(-order.section_samples // batch_samples)
        if any(part.stream.folder.remote for part in parts) and (self.packing == "stream" or self.sections):
            loader.fetcher = partial(ShardFetcher, [(part.stream, part.ends) for part in parts])
        loader.epoch = batches_of_epoch(getattr(self.trainer, "limit_train_batches", None), batches)
        loader.repeats = repeats
        loader.batches_per_read = max(1, READ // (self.batch_size * self.length))
        return loader

    def val_dataloader(self) -> BlockBatches | list[BlockBatches]:
        """Return this rank's batches of the first `validation_segments` blocks of the validation split of each part.

        A batch is {"tokens": (B, T + 1) int64, "index": (B,) int64, "scored": (B, T) bool} with T = `length` and B at
        most `batch_size`. "scored" is False in rows that only pad the last batch. With `mask_documents`, the batch also
        has "documents". The result is a list if there is a mixture.
        """
        rank, world_size = rank_and_world_size(self)

        def batches(part: Part, blocks: TextBlocks) -> BlockBatches:
            size = min(self.batch_size, len(blocks))
            assert isinstance(blocks.stream, TokenStream)  # of a split
            return BlockBatches(blocks, size, rank, world_size, self._documents(part, blocks.stream))

        if self.mixture is not None:
            return [batches(part, part.validation_blocks(self.length, self.validation_segments)) for part in self.parts]
        blocks = self.text("validation").blocks(self.length, self.validation_segments, fewer=True)
        return batches(self.parts[0], blocks)

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

    def _documents(self, part: Part, stream: TokenStream) -> Documents | None:
        """Return the documents of a stream of a part, or None if training and validation do not use them."""
        if not self.mask_documents and self.score_first_targets:
            return None
        return Documents(part.begins(stream), self.mask_documents, self.score_first_targets)

    def _samples(self, number: int, part: Part) -> Samples:
        """Return the training samples of a part.

        Args:
            number: Index of the part, which determines the order together with the seed.
            part: The part.
        """
        # the shards of this section and the next one
        stream = part.stream("train", self.sections and 2 * self.sections + 1)
        if self.packing == "best_fit":
            documents = Documents(part.begins(stream), self.mask_documents, self.score_first_targets)
            shard_ends = None if self.sections is None else stream.ends
            end_of_text = self.manifest.end_of_text
            packed = PackedSamples(stream, documents, end_of_text, self.length, self.seed, shard_ends)
            if rank_and_world_size(self)[0] == 0:
                print(f"{part.name or self.location}: {packed.summary}", file=sys.stderr)
            # in the order, a sample has the place of a token
            read, ends, length = packed.read, packed.ends.tolist(), 1
        else:
            read = partial(read_samples, stream, self.length, self._documents(part, stream))
            ends, length = stream.ends, self.length
        end = ends[-1] if ends else 0
        given = f"{part.name}, which has no tokens for training"
        require(end > 0 or not part.name, "data.mixture", given, "parts with documents for training")
        order: Order | SectionOrder
        if self.sections is None:
            order = Order(end, length, self.seed, number)
        else:
            order = SectionOrder(ends, length, self.sections, self.seed, *([number] if number else []))
        return Samples(read, order, stream, ends)

    @property
    def _training_checksum(self) -> str:
        """A sha256 of the checksums of the training tokens, in the format of existing checkpoints."""
        return hashlib.sha256(repr([part.checksum("train") for part in self.parts]).encode()).hexdigest()

    @property
    def _shards_checksum(self) -> str:
        """A sha256 of the numbers of tokens of the training shards of each part."""
        shards = [[shard.tokens for shard in part.folder.manifest.splits["train"].shards] for part in self.parts]
        return hashlib.sha256(repr(shards).encode()).hexdigest()
