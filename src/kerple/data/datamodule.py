"""`TokenShards`: the data module that gives Lightning the batches of a language modelling run.

The file has more than 300 lines because one class has all 23 options, each with its sentence and its check.
"""

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_lightning import LightningDataModule
from pytorch_lightning.trainer.states import TrainerFn
from tokenizers import Tokenizer
from torch import Tensor

from kerple.base.errors import UserError
from kerple.data.files import is_remote
from kerple.data.loader import BatchLoader, BlockBatches, Blocks, EvaluationLoader, TrainingBatches, rank_in
from kerple.data.manifest import SPLITS, Manifest, read_manifest
from kerple.data.order import Mixture, Order
from kerple.data.prepare.build import LARGEST_LOSS, build, check_recipe
from kerple.data.prepare.settings import Recipe, default_directory
from kerple.data.remote import CACHE_BYTES, Folder, open_folder
from kerple.data.shards import TokenStream
from kerple.data.tokenizer import TRAINED_HERE, token_bytes, uncut


class TokenShards(LightningDataModule):
    """Language modelling data in token shards, which are prepared on first use.

    Documents are concatenated, each followed by an end-of-text token, which is a target like any other. Attention is
    not reset between documents, as in the paper. A training sample is `length` + 1 consecutive tokens, and the samples
    of the whole corpus are shuffled. Sample k is a function of `seed` and k alone, for any number of devices, workers
    and accumulation steps.

    The training loader has one epoch, which lasts as long as the run: `trainer.max_steps` steps, or, without these, the
    training split once. With `samples`, an epoch has these samples, and every further one has them again.

    Args:
        corpus: What to train on: `stdlib` (the standard library of the running Python), `modules` (only the modules
            at its top, in alphabetical order), `packages` (`stdlib` and the packages which this project requires), a
            file, folder, glob pattern or URL of .jsonl, .jsonl.zst, .jsonl.gz, .tar of those, .parquet or text files,
            or `hf:NAME[:CONFIG[:SPLIT]]`. With null, the shards in `directory` are used as they are.
        tokenizer: `bpe` trains a byte-level BPE on the training split. Else a tokenizer.json, a folder with one, a name
            on the Hugging Face hub such as gpt2, or `hf:` and a pretrained model's folder, GGUF file or name.
        vocabulary: Number of entries of a tokenizer that is trained here, and of rows of the model's embedding. Any
            other tokenizer may have at most so many entries.
        directory: Folder of the shards, or the URL of a prepared one. With null, data/<corpus>-<tokenizer>.
        length: Training length T in tokens; a sample has T targets.
        batch_size: Samples per device and micro-batch.
        seed: Chooses the order of the training samples.
        samples: Number of different training samples, over all devices, which are repeated until `trainer.max_steps`.
            With null, as many as `trainer.max_steps` needs, or without that the training split once.
        shares: Shares of the documents in the training, validation and test split. A hash of the text decides.
        text_field: Key of the text in JSON lines, or its column in Parquet files and datasets.
        drop_duplicates: Whether only the first of several documents with exactly equal text is kept. Duplicates are
            counted in both cases.
        on_fault: What happens to a document that is broken, not Unicode, nested too deeply or too large: `skip` counts
            it and goes on, `raise` stops.
        largest_document: Largest size of a document or a line of JSON, in bytes.
        largest_loss: Largest share of the corpus's bytes that may be left out because of faults.
        validation_segments: Largest number of segments, of `length` targets each, for the validation loss.
        shuffle_shards: Number of shards (of 64 Mi tokens) whose samples are shuffled together; the order of the shards
            is shuffled too. With null, all samples of the corpus are shuffled together. Set it for shards at a URL of
            which only a part fits into the cache.
        cache: Folder for copies of shards from a URL.
        cache_bytes: Largest size of those copies in bytes; they must hold one shard more than `shuffle_shards`.
        mixture: Prepared folders and their weights in the training samples. Validation and test data stay those of
            `directory`. With null, `directory` alone.
        workers: Number of processes that load batches ahead; memory-mapped shards seldom need one.
        prepare_workers: Number of processes that tokenise. With 0, one per core.
        prepare_engine: Where they run: on this machine (`local`) or on a cluster by Ray (`ray`).
        verify: Whether the checksum of each run of tokens is checked when it is first used; downloads always are.

    Raises:
        UserError: A setting is out of its range, or corpus and directory are both null.
    """

    manifest: Manifest
    evaluation_length: int | None = None
    evaluation_blocks: int | None = None
    reads_only: bool = False
    """Whether missing shards are an error; they are prepared otherwise. `test` and `predict` set it."""

    def __init__(
        self,
        corpus: str | None = "stdlib",
        tokenizer: str = TRAINED_HERE,
        vocabulary: int = 2048,
        directory: str | None = None,
        length: int = 64,
        batch_size: int = 128,
        seed: int = 1235,
        samples: int | None = None,
        shares: tuple[float, float, float] = (0.9, 0.05, 0.05),
        text_field: str = "text",
        drop_duplicates: bool = False,
        on_fault: Literal["skip", "raise"] = "skip",
        largest_document: int = 1 << 26,
        largest_loss: float = LARGEST_LOSS,
        validation_segments: int = 512,
        shuffle_shards: int | None = None,
        cache: str = "data/.cache",
        cache_bytes: int = CACHE_BYTES,
        mixture: dict[str, float] | None = None,
        workers: int = 0,
        prepare_workers: int = 0,
        prepare_engine: Literal["local", "ray"] = "local",
        verify: bool = True,
    ) -> None:
        super().__init__()
        if corpus is None and directory is None:
            raise UserError("data.directory: got null, expected a folder of shards, because data.corpus is null")
        for name, value, low in (
            ("length", length, 1),
            ("batch_size", batch_size, 1),
            ("validation_segments", validation_segments, 1),
            ("workers", workers, 0),
            ("prepare_workers", prepare_workers, 0),
            ("largest_document", largest_document, 1),
            ("samples", 1 if samples is None else samples, 1),
            ("shuffle_shards", 1 if shuffle_shards is None else shuffle_shards, 1),
        ):
            if value < low:
                raise UserError(f"data.{name}: got {value}, expected {low} or more")
        if not 0 <= largest_loss <= 1:
            raise UserError(f"data.largest_loss: got {largest_loss}, expected a share of 0 to 1")
        self.recipe = None
        self.place = (directory or default_directory(corpus or "", tokenizer, vocabulary)).removeprefix("file://")
        if corpus is not None and not is_remote(self.place):  # shards at a URL are already prepared
            self.recipe = Recipe(
                corpus,
                tokenizer,
                vocabulary,
                (shares[0], shares[1], shares[2]),
                text_field,
                drop_duplicates,
                largest_document,
            )
        self.shuffle_shards, self.cache, self.cache_bytes = shuffle_shards, cache, cache_bytes
        self.vocabulary, self.length, self.batch_size, self.seed = vocabulary, length, batch_size, seed
        self.samples, self.on_fault, self.validation_segments = samples, on_fault, validation_segments
        self.mixture, self.workers, self.prepare_workers, self.verify = mixture, workers, prepare_workers, verify
        self.prepare_engine, self.largest_loss = prepare_engine, largest_loss
        self._tokenizer: Tokenizer | None = None

    def prepare_data(self) -> None:
        """Prepare the shards unless they are there; an interrupted preparation goes on where it stopped."""
        if self.recipe is not None and self.reads_only:
            check_recipe(read_manifest(Path(self.place)), self.recipe)
        elif self.recipe is not None:
            build(
                Path(self.place),
                self.recipe,
                self.prepare_workers,
                self.on_fault,
                self.prepare_engine,
                self.largest_loss,
            )

    def setup(self, stage: str | None = None) -> None:
        """Open the folder of the shards and read its manifest.

        Raises:
            UserError: The manifest cannot be used, or its vocabulary is larger than `vocabulary`.
        """
        self.folder = self._open(self.place)
        self.manifest = self.folder.manifest

    def state_dict(self) -> dict[str, str]:
        """Checksums of the tokenizer and of the training data, which a checkpoint of a fit keeps."""
        return {"tokenizer": self.manifest.tokenizer, "training": self._training_checksum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse a checkpoint that was fitted with another tokenizer, or, where a fit goes on, on other data.

        Raises:
            UserError: The checksums in `state` are not those of these shards.
        """
        state = state if isinstance(state, dict) else {}  # of a file that a stranger may have written
        if state.get("tokenizer", self.manifest.tokenizer) != self.manifest.tokenizer:
            raise UserError(
                f"data.directory: got {self.place}, whose tokenizer is not the one that the checkpoint was trained "
                "with, so that its token ids mean other text; name the folder of before, or prepare one with its "
                "tokenizer.json as data.tokenizer"
            )
        fitting = self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
        if fitting and state.get("training", self._training_checksum) != self._training_checksum:
            raise UserError(
                f"data.directory: got {self.place}, whose training tokens are not those with which the fit began; name "
                "the folders of before, or start a new training from its weights with --weights"
            )

    def train_dataloader(self) -> BatchLoader:
        """Training batches of this rank, {"tokens": (B, T + 1) int64}, for the whole run.

        Raises:
            UserError: The corpus is too small for a batch, or the folders of `mixture` do not fit together.
        """
        streams, orders, weights = [], [], []
        for number, (folder, weight) in enumerate(self._training_folders()):
            streams.append(folder.stream("train"))
            orders.append(self._order(folder, number))
            weights.append(weight)
        rank, ranks = rank_in(self)
        together = self.batch_size * ranks
        batches = self._batches(sum(order.samples for order in orders), together)
        mixture = Mixture(orders, weights, self.seed)
        dataset = TrainingBatches(streams, mixture, self.length, self.batch_size, batches, rank, ranks)
        return BatchLoader(dataset, together, self.workers, self._pin_memory())

    def val_dataloader(self) -> EvaluationLoader:
        """Batches of segments of `length` targets from the beginning of the validation split.

        A batch is {"tokens": (B, T + 1), "index": (B,), "scored": (B, T)}; "scored" is False in the rows that fill up
        the last batch.
        """
        blocks = self.blocks("validation", self.length, self.validation_segments)
        batches = BlockBatches(blocks, min(self.batch_size, max(len(blocks), 1)), *rank_in(self), scored=True)
        return EvaluationLoader(batches, self._pin_memory())

    def test_dataloader(self) -> EvaluationLoader:
        """The first `evaluation_blocks` blocks of the test split, of `evaluation_length` targets each, one per batch.

        Unset, they mean all blocks, and `length`. A batch is {"tokens": (1, length + 1), "index": (1,)}. Every rank
        gets the same number of batches; some are fillers of index -1.
        """
        blocks = self.blocks("test", self.evaluation_length or self.length, self.evaluation_blocks)
        return EvaluationLoader(BlockBatches(blocks, 1, *rank_in(self)), self._pin_memory())

    def blocks(self, split: str, length: int, limit: int | None = None) -> Blocks:
        """Disjoint blocks of `length` targets of a split, at most `limit`, as a map-style dataset.

        Raises:
            UserError: There is no such split, or it is shorter than one block.
        """
        if split not in SPLITS:
            raise UserError(f"split: got {split!r}, expected one of {', '.join(SPLITS)}")
        blocks = Blocks(self.stream(split), length, limit)
        if len(blocks) == 0:
            raise UserError(
                f"{self.place}: got {len(blocks.stream)} tokens in split {split}, expected at least {length + 1} for a "
                f"block of {length} targets (length, lengths or block_length); give the split a larger share, or use a "
                "larger corpus"
            )
        return blocks

    def stream(self, split: str) -> TokenStream:
        """The tokens of a split as one long array."""
        return self._folder().stream(split)

    def documents(self, split: str) -> NDArray[np.int64]:
        """Index of the first token of each document of a split, (documents,) int64, ascending.

        Raises:
            UserError: The file that holds them is missing or differs from the manifest.
        """
        return self._folder().documents(split)

    def token_bytes(self) -> Tensor:
        """Number of bytes of text of each token id, (vocabulary,) int64; 0 for end-of-text and for unused ids."""
        sizes = torch.zeros(self.vocabulary, dtype=torch.int64)
        known = torch.tensor(token_bytes(self._load_tokenizer()))
        sizes[: len(known)] = known
        return sizes

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without an end-of-text token."""
        tokenizer = self._load_tokenizer()
        tokenizer.encode_special_tokens = True
        return tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Tensor | list[int]) -> str:
        """The text of token ids (n,); an end-of-text token becomes its name."""
        ids = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        return self._load_tokenizer().decode(ids, skip_special_tokens=False)

    def _training_folders(self) -> list[tuple[Folder, float]]:
        if self.mixture is None:
            return [(self._folder(), 1.0)]
        if not self.mixture:
            raise UserError("data.mixture: got {}, expected prepared folders and their weights, or null for none")
        folders = [(self._open(place), float(weight)) for place, weight in self.mixture.items()]
        for folder, _ in folders:
            if folder.manifest.tokenizer != self._folder().manifest.tokenizer:
                raise UserError(
                    f"data.mixture: got {folder.place}, which has another tokenizer than {self.place}; prepare it with "
                    f"data.tokenizer: {self.place}/tokenizer.json"
                )
            # a hash of its text puts a document in a split, so that equal shares keep a text of both in the same one
            share, own = _training_share(folder.manifest), _training_share(self.manifest)
            if share is not None and own is not None and share > own:
                raise UserError(
                    f"data.mixture: got {folder.place}, whose training split has {share:g} of its documents, more than "
                    f"the {own:g} of {self.place}, so that it may hold validation and test text of the latter; prepare "
                    "it with the same data.shares"
                )
        return folders

    @cached_property  # every checkpoint asks for it, and a folder may be at a URL
    def _training_checksum(self) -> str:
        """A sha256 of the training tokens of all folders, which does not read them."""
        sums = [folder.manifest.splits["train"].checksums for folder, _ in self._training_folders()]
        return hashlib.sha256(repr(sums).encode()).hexdigest()

    def _batches(self, samples_in_corpus: int, together: int) -> int:
        """Number of micro-batches in an epoch, of `together` samples each."""
        trainer = self.trainer
        if self.samples is not None:
            batches = self.samples // together
        elif trainer is not None and trainer.max_steps > 0:
            return trainer.max_steps * trainer.accumulate_grad_batches
        else:
            batches = samples_in_corpus // together
        if batches == 0:
            raise UserError(
                f"data.batch_size: got {self.batch_size}, {together} samples on all devices, but there are only "
                f"{self.samples or samples_in_corpus}; use a smaller batch_size or length, or a larger corpus"
            )
        return batches

    def _check_vocabulary(self, manifest: Manifest) -> None:
        if manifest.vocabulary > self.vocabulary:
            raise UserError(
                f"data.vocabulary: got {self.vocabulary}, expected at least {manifest.vocabulary}, with which "
                f"{manifest.place} was made; raise it, or prepare another folder"
            )

    def _folder(self) -> Folder:
        if not hasattr(self, "folder"):
            self.setup()
        return self.folder

    def _open(self, place: str) -> Folder:
        folder = open_folder(place, self.verify, self.cache, self.cache_bytes)
        self._check_vocabulary(folder.manifest)
        return folder

    def _order(self, folder: Folder, number: int) -> Order:
        split, layout = folder.manifest.splits["train"], folder.manifest.layout
        at_once = self.shuffle_shards or layout.shards(split.tokens)
        needed = (min(at_once, layout.shards(split.tokens)) + 1) * layout.shard_bytes(split.tokens, 0)
        if is_remote(folder.place) and needed > self.cache_bytes:
            raise UserError(
                f"data.cache_bytes: got {self.cache_bytes}, expected at least {needed} for the {at_once} shards of "
                f"{folder.place} that are shuffled together and one more; raise it or set a smaller shuffle_shards"
            )
        chunk = layout.run_tokens * layout.runs_per_shard if self.shuffle_shards else None
        return Order(split.tokens, self.length, self.seed, number, chunk=chunk, together=at_once)

    def _load_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = uncut(self._folder().tokenizer())
        return self._tokenizer

    def _pin_memory(self) -> bool:
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"


def _training_share(manifest: Manifest) -> float | None:
    """The share of documents in the training split, as a manifest has it; None if it does not."""
    shares = manifest.settings.get("shares")
    return shares[0] if isinstance(shares, list) and shares and isinstance(shares[0], int | float) else None
