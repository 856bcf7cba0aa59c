"""`TokenShards`: the data module that gives Lightning the batches of a language modelling run."""

import hashlib
from functools import cached_property
from typing import Any

from pytorch_lightning import LightningDataModule
from pytorch_lightning.trainer.states import TrainerFn

from kerple.base.errors import UserError
from kerple.data.loader import BatchLoader, BlockBatches, EvaluationLoader, TrainingBatches, rank_in
from kerple.data.manifest import SPLITS, Manifest
from kerple.data.options import ShardOptions
from kerple.data.order import Mixture, Order
from kerple.data.prepare.build import check_prepared, prepare
from kerple.data.shards import Folder
from kerple.data.text import ShardText, TextBlocks


class TokenShards(ShardOptions, LightningDataModule):
    """Language modelling data in token shards, which are prepared on first use; options: see `ShardOptions`.

    Documents are concatenated, each followed by an end-of-text token, which is a target like any other. Attention is
    not reset between documents, as in the paper. A training sample is `length` + 1 consecutive tokens, and the samples
    of the whole corpus, or of each of its `sections`, are shuffled. Sample k is a function of `seed` and k alone, for
    any number of devices, workers and accumulation steps.

    The training loader has one epoch, which lasts as long as the run: `trainer.max_steps` steps, or, if they are not
    set, the training split once. With `samples`, every epoch has the same samples, as many as this option says.
    """

    reads_only: bool = False
    """Whether missing shards are an error instead of being prepared. `test` and `predict` set it, because their
    options come from a checkpoint, which must not decide what is written."""

    def prepare_data(self) -> None:
        """Prepare the shards unless they exist; a preparation that was stopped goes on where it stopped."""
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
        return self._open(self.location)

    @property
    def manifest(self) -> Manifest:
        """What the folder of the shards holds."""
        return self.folder.manifest

    def checksum(self) -> str:
        """A sha256 of all data that is read: tokenizer and tokens of each split of `directory` and of all of `mixture`.

        It is the checksum of a text with one line, "tokenizer split tokens", for each folder (`directory` first) and
        split, where tokenizer and tokens are the checksums in the manifest. Equal tokens have an equal checksum,
        wherever their folder is and however they are cut into shards.
        """
        manifests = [self.manifest, *(folder.manifest for folder, _ in self._training_folders)]
        lines = (f"{m.tokenizer} {name} {m.splits[name].sha256}\n" for m in manifests for name in SPLITS)
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def state_dict(self) -> dict[str, str]:
        """Checksums of the tokenizer and of the training data, which a checkpoint of a fit keeps."""
        return {"tokenizer": self.manifest.tokenizer, "training": self._training_checksum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse a checkpoint that was fitted with another tokenizer, or, when a fit is resumed, on other data.

        Raises:
            UserError: The checksums in `state` are not those of these shards.
        """
        state = state if isinstance(state, dict) else {}  # the checkpoint may be from anybody
        if state.get("tokenizer", self.manifest.tokenizer) != self.manifest.tokenizer:
            raise UserError(f"data.directory: got {self.location}, whose tokenizer is not the one of the checkpoint")
        fitting = self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
        if fitting and state.get("training", self._training_checksum) != self._training_checksum:
            raise UserError(f"data.directory: got {self.location}, whose training tokens are not those of the fit")

    def train_dataloader(self) -> BatchLoader:
        """Training batches of this rank, {"tokens": (B, T + 1) int64}, for the whole run.

        Raises:
            UserError: The corpus is too small for a batch, or the folders of `mixture` do not fit together, or a batch
                of all devices has not equally many samples of each section.
        """
        streams = [folder.stream("train") for folder, _ in self._training_folders]
        options = {"sections": self.sections}
        orders = [Order(len(stream), self.length, self.seed, i, **options) for i, stream in enumerate(streams)]
        rank, ranks = rank_in(self)
        samples = self.batch_size * ranks  # of all ranks
        if samples % self.sections:
            raise UserError(f"data.sections: got {self.sections}, expected a divisor of {samples}, a batch's samples")
        batches = self._batches(sum(order.samples for order in orders), samples)
        mixture = Mixture(orders, [weight for _, weight in self._training_folders], self.seed)
        dataset = TrainingBatches(streams, mixture, self.length, self.batch_size, batches, rank, ranks)
        return BatchLoader(dataset, samples, self.workers, self._pin_memory())

    def val_dataloader(self) -> EvaluationLoader:
        """Batches of segments of `length` targets from the beginning of the validation split.

        A batch is {"tokens": (B, T + 1), "index": (B,), "scored": (B, T)}; "scored" is False in the rows that fill up
        the last batch.
        """
        blocks = self.blocks("validation", self.length, self.validation_segments)
        batches = BlockBatches(blocks, min(self.batch_size, max(len(blocks), 1)), *rank_in(self))
        return EvaluationLoader(batches, self._pin_memory())

    def test_dataloader(self) -> EvaluationLoader:
        """One batch of one block of the test split for each rank, because Lightning tests nothing without a batch.

        Callbacks that measure on text do not use these batches, but read the split by `blocks` or `stream`.
        """
        rank, ranks = rank_in(self)
        return EvaluationLoader(BlockBatches(self.blocks("test", self.length, ranks), 1, rank, ranks))

    def blocks(self, split: str, length: int, limit: int | None = None) -> TextBlocks:
        """Disjoint blocks of `length` targets of a split, at most `limit`; errors as of `text` and its blocks."""
        return self.text(split).blocks(length, limit, fewer=True)

    def text(self, split: str) -> ShardText:
        """The text of a split, which measures read; there is one object for each split."""
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

    @cached_property
    def _training_folders(self) -> list[tuple[Folder, float]]:
        if self.mixture is None:
            return [(self.folder, 1.0)]
        if not self.mixture:
            raise UserError("data.mixture: got {}, expected prepared folders and their weights, or null for none")
        folders = [(self._open(location), float(weight)) for location, weight in self.mixture.items()]
        for folder, _ in folders:
            if folder.manifest.tokenizer != self.manifest.tokenizer:
                raise UserError(f"data.mixture: {folder.directory} has another tokenizer than {self.location}")
            # a hash of its text assigns a document to a split: with equal fractions, equal texts are in one split
            fraction, allowed = (m.settings.get("split_fractions", [0])[0] for m in (folder.manifest, self.manifest))
            if fraction > allowed:
                raise UserError(
                    f"data.mixture: got {folder.directory}, whose training split has {fraction:g} of its documents, "
                    f"more than the {allowed:g} of {self.location}; prepare it with the same data.split_fractions"
                )
        return folders

    @property
    def _training_checksum(self) -> str:
        """A sha256 for the training tokens of all folders, computed from the checksums in their manifests."""
        sums = [folder.manifest.splits["train"].sha256 for folder, _ in self._training_folders]
        return hashlib.sha256(repr(sums).encode()).hexdigest()

    def _batches(self, samples_in_corpus: int, samples: int) -> int:
        """Number of micro-batches in an epoch, of ``samples`` samples each."""
        trainer, available = self.trainer, self.samples or samples_in_corpus
        if self.samples is None and trainer is not None and trainer.max_steps > 0:
            return trainer.max_steps * trainer.accumulate_grad_batches
        if available < samples:
            raise UserError(
                f"data.batch_size: got {self.batch_size}, {samples} samples on all devices, but there are only "
                f"{available}; use a smaller batch_size or length, or a larger corpus"
            )
        return available // samples

    def _open(self, location: str) -> Folder:
        folder = Folder(location)
        if folder.manifest.vocabulary > self.vocabulary:
            raise UserError(f"data.vocabulary: got {self.vocabulary}, but {location} has {folder.manifest.vocabulary}")
        return folder

    def _pin_memory(self) -> bool:
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
