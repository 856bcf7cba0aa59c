"""The data of a run as Lightning wants it."""

import hashlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_lightning import LightningDataModule
from tokenizers import Tokenizer
from torch import Tensor

from kerple.data.files import is_remote
from kerple.data.loader import Batch, BatchLoader, BlockBatches, Blocks, EvaluationLoader, TrainingBatches
from kerple.data.manifest import SPLITS, Manifest, read_manifest
from kerple.data.order import Mixture, Order
from kerple.data.prepare.build import LARGEST_LOSS, build, check_recipe
from kerple.data.prepare.corpora import HUB
from kerple.data.prepare.recipe import Recipe
from kerple.data.remote import CACHE_BYTES, Folder, open_folder
from kerple.data.shards import TokenStream
from kerple.data.tokenizer import OF_A_MODEL, TRAINED_HERE, load_tokenizer, token_bytes
from kerple.errors import UserError


class TokenShards(LightningDataModule):
    """Language modelling data in token shards, prepared on first use.

    Documents are packed back to back, each ended by an end-of-text token that is scored; attention is not reset between
    them, as in the paper. Training samples are runs of `length` + 1 tokens, shuffled over the whole corpus; sample k is
    a function of `seed` and k alone, for any number of devices, workers and accumulation steps.

    The training loader is one epoch as long as the run: `trainer.max_steps` steps, or `samples` samples, or, with
    neither, the training split once.

    Args:
        corpus: `stdlib` (the standard library of the running Python), `packages` (that and the packages this project
            requires), a file, folder, pattern or URL of .jsonl, .jsonl.zst, .jsonl.gz, .tar of those, .parquet or text
            files, or `hf:NAME[:CONFIG[:SPLIT]]`. null: use the shards in `directory` as they are.
        tokenizer: `bpe` trains a byte-level BPE on the training split; else a tokenizer.json, a directory with one, a
            name on the Hugging Face hub such as gpt2, or `hf:` and a pretrained model's folder, GGUF file or name.
        vocabulary: Entries of a tokenizer trained here, and rows of the model's embedding; at least the entries of any
            other tokenizer.
        directory: Folder of the shards, or a URL of one that is prepared. null: data/<corpus>-<tokenizer>.
        length: Training length T in tokens; a sample has T targets.
        batch_size: Samples per device and micro-batch.
        seed: Chooses the order of the training samples.
        samples: Training samples in the run over all devices. null: what `trainer.max_steps` needs, or else the
            training split once.
        shares: Shares of the documents in the training, validation and test split, by a hash of the text.
        text_field: Key of the text in JSON lines, or column of Parquet files and datasets.
        drop_duplicates: Keep only the first of documents with exactly equal text. They are counted either way.
        on_fault: Count documents that are broken, not Unicode, nested too deep or too large and go on (`skip`), or stop
            (`raise`).
        largest_document: Bytes beyond which a document or line of JSON is too large.
        largest_loss: Share of the corpus's bytes that may be left out for their faults. A larger loss is an error.
        validation_segments: At most so many segments of `length` targets make up the validation loss.
        shuffle_shards: Shuffle the samples of so many shards (of 64 Mi tokens) together, and the shards, instead of all
            samples of the corpus: for shards at a URL, of which only a part fits into the cache.
        cache: Folder for copies of shards from a URL.
        cache_bytes: Size below which those copies are kept; must hold `shuffle_shards` shards and one.
        mixture: Prepared folders and their weights in the training samples; validation and test stay those of
            `directory`. null: only `directory`.
        workers: Processes that load batches ahead; memory-mapped shards seldom need one.
        prepare_workers: Processes that tokenise. 0: one a core.
        prepare_engine: Where they run: on this machine (`local`), or over a cluster by Ray (`ray`).
        verify: Compare the checksum of each run of tokens when it is first used.
    """

    manifest: Manifest
    evaluation_length: int | None = None
    evaluation_blocks: int | None = None
    reads_only: bool = False
    """Whether shards that are missing are an error, instead of being built."""

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
            raise UserError("directory: must name a folder of shards when corpus is null")
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
                raise UserError(f"{name}: must be at least {low}, got {value}")
        if not 0 <= largest_loss <= 1:
            raise UserError(f"data.largest_loss: got {largest_loss}, expected a share of 0 to 1")
        self.recipe = None
        self.place = directory or default_directory(corpus or "", tokenizer, vocabulary)
        if corpus is not None and not is_remote(self.place):  # what lies at a URL is prepared
            self.recipe = Recipe(
                corpus, tokenizer, vocabulary, tuple(shares), text_field, drop_duplicates, largest_document
            )
        self.shuffle_shards, self.cache, self.cache_bytes = shuffle_shards, cache, cache_bytes
        self.vocabulary, self.length, self.batch_size, self.seed = vocabulary, length, batch_size, seed
        self.samples, self.on_fault, self.validation_segments = samples, on_fault, validation_segments
        self.mixture, self.workers, self.prepare_workers, self.verify = mixture, workers, prepare_workers, verify
        self.prepare_engine, self.largest_loss = prepare_engine, largest_loss
        self._tokenizer: Tokenizer | None = None

    def prepare_data(self) -> None:
        """Build the shards that are missing; an interrupted preparation goes on where it stopped."""
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
        """Read the manifest and check it against the settings.

        Raises:
            UserError: The shards were prepared with other settings or do not fit the vocabulary or each other.
        """
        self.folder = self._open(self.place)
        self.manifest = self.folder.manifest

    def train_dataloader(self) -> BatchLoader:
        streams, orders, weights = [], [], []
        for number, (folder, weight) in enumerate(self._training_folders()):
            streams.append(folder.stream("train"))
            orders.append(self._order(folder, number))
            weights.append(weight)
        rank, ranks = self._rank()
        together = self.batch_size * ranks
        batches = self._batches(sum(order.samples for order in orders), together)
        mixture = Mixture(orders, weights, self.seed)
        dataset = TrainingBatches(streams, mixture, self.length, self.batch_size, batches, rank, ranks)
        return BatchLoader(dataset, together, self.workers, self._pin_memory())

    def val_dataloader(self) -> EvaluationLoader:
        """Segments of `length` targets from the beginning of the validation split.

        {"tokens": (B, T + 1), "scored": (B, T)}; "scored" is False in the rows that only fill up a last batch.
        """
        blocks = self.blocks("validation", self.length, self.validation_segments)
        batches = BlockBatches(blocks, min(self.batch_size, max(len(blocks), 1)), *self._rank(), scored=True)
        return EvaluationLoader(batches, 0, self._pin_memory())

    def test_dataloader(self) -> EvaluationLoader:
        """The first `evaluation_blocks` blocks (unset: all) of the test split, `evaluation_length` targets each (unset:
        `length`), one a batch.

        {"tokens": (1, length + 1), "index": (1,)}; every rank gets as many, short ranks fillers of index -1.
        """
        blocks = self.blocks("test", self.evaluation_length or self.length, self.evaluation_blocks)
        return EvaluationLoader(BlockBatches(blocks, 1, *self._rank()), 0, self._pin_memory())

    def blocks(self, split: str, length: int, limit: int | None = None) -> Blocks:
        """Disjoint runs of `length` targets of a split, as a map-style dataset.

        Raises:
            UserError: There is no such split, or it is shorter than one block.
        """
        if split not in SPLITS:
            raise UserError(f"split: got {split!r}, expected one of {', '.join(SPLITS)}")
        blocks = Blocks(self.stream(split), length, limit)
        if len(blocks) == 0:
            raise UserError(
                f"{self.place}: split {split} has {len(blocks.stream)} tokens, a block of {length} targets needs "
                f"{length + 1}; give the split a larger share, or use a larger corpus"
            )
        return blocks

    def stream(self, split: str) -> TokenStream:
        """The tokens of a split."""
        return self._folder().stream(split)

    def documents(self, split: str) -> NDArray[np.int64]:
        """Where each document of a split begins in its token stream, (documents,) ascending.

        Raises:
            UserError: The file of them is missing or not what the manifest says.
        """
        return self._folder().documents(split)

    def token_bytes(self) -> Tensor:
        """Bytes of text behind each token id, (vocabulary,) int64; 0 for end-of-text and ids without a token."""
        sizes = torch.zeros(self.vocabulary, dtype=torch.int64)
        known = torch.tensor(token_bytes(self._load_tokenizer()))
        sizes[: len(known)] = known
        return sizes

    def encode(self, text: str) -> list[int]:
        """Token ids, without an end-of-text token."""
        tokenizer = self._load_tokenizer()
        tokenizer.encode_special_tokens = True
        return tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Tensor | list[int]) -> str:
        """Text of token ids (n,), end-of-text tokens spelt out."""
        ids = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        return self._load_tokenizer().decode(ids, skip_special_tokens=False)

    def transfer_batch_to_device(self, batch: Batch, device: Any, dataloader_idx: int) -> Batch:
        return {
            key: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
            for key, value in batch.items()
        }

    def _training_folders(self) -> list[tuple[Folder, float]]:
        if self.mixture is None:
            return [(self._folder(), 1.0)]
        if not self.mixture:
            raise UserError("mixture: is empty; name prepared folders and their weights, or null for none")
        folders = [(self._open(place), float(weight)) for place, weight in self.mixture.items()]
        for folder, _ in folders:
            if folder.manifest.tokenizer != self._folder().manifest.tokenizer:
                raise UserError(
                    f"mixture: {folder.place} has another tokenizer than {self.place}; prepare it with data.tokenizer: "
                    f"{self.place}/tokenizer.json"
                )
        return folders

    def _batches(self, samples_in_corpus: int, together: int) -> int:
        """Micro-batches in the run."""
        trainer = self.trainer
        if self.samples is not None:
            batches = self.samples // together
        elif trainer is not None and trainer.max_steps > 0:
            return trainer.max_steps * trainer.accumulate_grad_batches
        else:
            batches = samples_in_corpus // together
        if batches == 0:
            raise UserError(
                f"batch_size: one batch of all devices takes {together} samples, there are "
                f"{self.samples or samples_in_corpus}; use a smaller batch_size or length, or a larger corpus"
            )
        return batches

    def _check_vocabulary(self, manifest: Manifest) -> None:
        if manifest.vocabulary > self.vocabulary:
            raise UserError(
                f"vocabulary: {self.vocabulary}, but {manifest.place} was made with a vocabulary of "
                f"{manifest.vocabulary}; set data.vocabulary to at least that, or prepare another folder"
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
                f"cache_bytes: {self.cache_bytes}, but the {at_once} shards of {folder.place} that are shuffled "
                f"together and one more take {needed}; raise it or set a smaller shuffle_shards"
            )
        chunk = layout.run_tokens * layout.runs_per_shard if self.shuffle_shards else None
        return Order(split.tokens, self.length, self.seed, number, chunk=chunk, together=at_once)

    def _load_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            path = self._folder().directory / "tokenizer.json"
            if hashlib.sha256(path.read_bytes()).hexdigest() != self.manifest.tokenizer:
                raise UserError(f"{path}: its sha256 is not the manifest's; prepare or copy the folder again")
            self._tokenizer = load_tokenizer(str(path))
        return self._tokenizer

    def _rank(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)

    def _pin_memory(self) -> bool:
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"


def default_directory(corpus: str, tokenizer: str, vocabulary: int) -> str:
    """data/<corpus>-<tokenizer>, from the last part of each name without its endings."""
    name = corpus.removeprefix(HUB).replace(":", "/").rstrip("/*").rpartition("/")[2].partition(".")[0] or "corpus"
    kind = (
        f"{tokenizer}{vocabulary}"
        if tokenizer == TRAINED_HERE
        else Path(tokenizer.removeprefix(OF_A_MODEL).removesuffix("/tokenizer.json")).stem
    )
    return f"data/{name}-{kind}"
