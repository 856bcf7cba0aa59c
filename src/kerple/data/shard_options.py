"""`ShardOptions`: the options of `TokenShards`. This file does not import torch, so that `prepare` starts fast."""

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kerple.base.errors import require
from kerple.base.processor_cores import check_workers
from kerple.data.file_opening import hide_query, without_query
from kerple.data.remote_shards import is_url
from kerple.data.tokenizer import MODEL_PREFIX, TRAINED_HERE

HUB = "hf:"  # prefix of datasets of the Hugging Face hub
CACHE, CACHE_GB = "data/.cache", 100.0  # defaults of the options cache and cache_gb


@dataclass(eq=False)
class ShardOptions:
    """Options of the preparation and the reading of token shards.

    Args:
        corpus: The text: `code` (the source of 44 packages, 183 MB, fetched by pip, the same on every machine),
            `code-demo` (ten of these packages, 30 MB), `rfc` (the RFCs, 462 MB, fetched by Debian's apt), `stdlib` (the
            standard library of the running Python), `modules` (the top-level modules of `stdlib` in alphabetical
            order), `hf:NAME`, `hf:NAME:CONFIG` or `hf:NAME:CONFIG:SPLIT` (a dataset of the Hugging Face hub), or a
            file, folder, glob pattern or URL of text files, JSON lines (.jsonl), tar files of both, or Parquet files.
            A pattern may have alternatives, such as 'texts/*.{txt,md}'. All but Parquet files may be compressed (.gz,
            .zst). With null, the shards in `directory` are used, and nothing is prepared or compared with a corpus.
        tokenizer: `bpe` is a byte-level BPE that is trained on the training split. For `code`, `code-demo` and `rfc`
            with 2048 or 8192 entries, kerple contains the trained BPE, and no training is needed. Other values are a
            tokenizer.json, a folder with one, a name on the Hugging Face hub such as gpt2, or `hf:` and a pretrained
            model's folder, GGUF file or name.
        vocabulary: Number of entries of a tokenizer that is trained, and of rows of the model's embedding. A loaded
            tokenizer may have fewer entries.
        directory: Folder of the shards, or the URL of a prepared folder, whose shards are copied to `cache` when they
            are needed. With null, data/<corpus>-<tokenizer>.
        source: Folder with the wheels of `code` and `code-demo`, or with rfc1.txt, rfc2.txt and so on. Missing files
            are fetched into it. With null, a subfolder of `cache`.
        length: Training length in tokens, which is the number of targets of a sample.
        batch_size: Samples per device and micro-batch.
        seed: Seed of the order of the training samples. It does not follow `seed_everything`.
        packing: `stream` cuts the training split every `length` tokens. `best_fit` puts whole documents into each
            sample, and cuts only documents longer than `length` (`kerple.data.packing`); what is cut and padded is
            printed. With `sections`, the documents of each shard are packed separately.
        mask_documents: Whether queries see only keys of their own document, in training, validation and tests. An
            end-of-text token is the first input of the document after it.
        restart_positions: With `mask_documents`, whether positions restart at each document. It has no effect on
            strategies that depend on distances only.
        score_first_targets: Whether the first token of a document contributes to the loss in training and validation.
        mixture: Prepared folders of shards, or their URLs, each with its fraction of the training tokens. The fractions
            are multiples of 0.001, and their sum is 1. `FOLDER[LOW:HIGH]` selects the documents of at least LOW and
            fewer than HIGH tokens. Each part has a validation loss, and `val/loss` is their mean with these fractions.
            Tests use `directory`, whose tokenizer the parts must have. With null, all splits are those of `directory`.
        repeat_parts: Whether a part of the mixture starts again when its samples are used up. If false, a training that
            needs more samples is an error.
        samples: Number of different training samples over all devices, rounded down to full batches. They are repeated
            until `trainer.max_steps`. With null, as many samples as `trainer.max_steps` steps need, or those of the
            training split if `max_steps` is not set.
        split_fractions: Fractions of the documents in the training, validation and test split. Each document is
            assigned to a split by a hash of its text; in `rfc`, by a hash of the name of its family of RFCs. In `code`
            and `code-demo` the package determines the split, and the fractions have no effect.
        text_field: Key of the text in JSON lines, or name of its column in Parquet files and datasets.
        encoding: Encoding of text files, such as utf-8, latin-1 or utf-16, or several, separated by commas. The first
            encoding in which a file can be read is used. latin-1 can read any file, so it must be the last one. JSON
            lines, Parquet files, datasets and built-in corpora are UTF-8.
        drop_duplicates: Whether only the first of several documents with equal text is kept, as always in `code` and
            `code-demo`. The comparison needs about 100 bytes of memory for each document.
        max_dropped_fraction: Largest accepted fraction of bytes in documents that are not Unicode, or JSON without a
            text. Such documents are left out. With 1, damaged files are also accepted, whose lost text has an unknown
            size.
        validation_segments: Largest number of segments, of `length` targets each, for the validation loss.
        sections: Number of shards that are read at a time. Each pass over the training split visits the shards in
            random order, and shuffles the samples of this number of shards. With several processes, each reads its own
            part of these shards. With null, samples are shuffled over the whole training split.
        cache: Folder with a subfolder for the downloaded files of `code` and `code-demo`, one for those of `rfc`, and
            one for shards from URLs. Several runs may share it.
        cache_gb: Size of the shards from URLs in `cache`, in 10⁹ bytes. The least recently used ones are deleted.
        workers: Number of processes that load batches ahead. Reading memory-mapped shards is fast, so 0 is usually
            enough.
        prepare_workers: Number of processes that tokenise. With 0, one per core.

    Attributes:
        location (str): Folder of the shards, `directory` or its default.
        source_folder (str): Folder of the downloaded files, `source` or its default.

    Raises:
        UserError: An option is out of range, or corpus and directory are both null.
    """

    corpus: str | None = "stdlib"
    tokenizer: str = TRAINED_HERE
    vocabulary: int = 2048
    directory: str | None = None
    source: str | None = None
    length: int = 64
    batch_size: int = 128
    seed: int = 1235
    packing: Literal["stream", "best_fit"] = "stream"
    mask_documents: bool = False
    restart_positions: bool = True
    score_first_targets: bool = True
    mixture: dict[str, float] | None = None
    repeat_parts: bool = True
    samples: int | None = None
    split_fractions: tuple[float, float, float] = (0.9, 0.05, 0.05)
    text_field: str = "text"
    encoding: str = "utf-8"
    drop_duplicates: bool = False
    max_dropped_fraction: float = 0.01
    validation_segments: int = 512
    sections: int | None = None
    cache: str = CACHE
    cache_gb: float = CACHE_GB
    workers: int = 0
    prepare_workers: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        given = self.corpus is not None or self.directory is not None
        require(given, "data.directory", "null", "a folder of shards, because data.corpus is null")
        for name in ("length", "batch_size", "validation_segments", "samples", "sections"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"data.{name}", value, "1 or more")
        used = self.mask_documents or self.restart_positions
        require(used, "data.restart_positions", "false", "true, because data.mask_documents is false")
        if self.mixture is not None:
            sizes = [1000 * weight for weight in self.mixture.values()]
            valid = all(0 < size <= 1000 and abs(size - round(size)) < 1e-6 for size in sizes)
            valid = valid and sum(map(round, sizes)) == 1000
            expected = "fractions of the training tokens by folder, multiples of 0.001 above 0 whose sum is 1"
            require(valid, "data.mixture", self.mixture, expected)
        used = self.repeat_parts or self.mixture is not None
        require(used, "data.repeat_parts", "false", "true, because there is no data.mixture")
        for name in ("workers", "prepare_workers"):
            check_workers(f"data.{name}", getattr(self, name))
        require(self.cache_gb > 0, "data.cache_gb", self.cache_gb, "a number above 0")
        for encoding in self.encoding.split(","):
            expected = "names of encodings, such as utf-8 or utf-8,latin-1"
            require(_is_encoding(encoding), "data.encoding", self.encoding, expected)
        for encoding in self.encoding.split(",")[:-1]:
            expected = f"{encoding} in the last place, because it can read any file"
            require(not _reads_any_file(encoding), "data.encoding", self.encoding, expected)
        fractions = self.split_fractions
        valid = len(fractions) == 3 and min(fractions) >= 0 and abs(sum(fractions) - 1) <= 1e-6
        require(valid, "data.split_fractions", fractions, "three fractions whose sum is 1")
        self.location = self.directory or _default_directory(self.corpus or "", self.tokenizer, self.vocabulary)
        if is_url(self.location):
            self.corpus = None  # shards at a URL are prepared already
        self.source_folder = self.source or f"{self.cache}/{(self.corpus or '').partition('-')[0]}"

    def content_options(self) -> dict[str, Any]:
        """Return the options on which the content of the shards depends, with values that JSON can represent.

        The corpus has no query, which may be a secret (`hide_query`).
        """
        names = ("corpus", "tokenizer", "vocabulary", "split_fractions", "text_field", "encoding", "drop_duplicates")
        changes = {"corpus": self.corpus and hide_query(self.corpus), "split_fractions": list(self.split_fractions)}
        return {name: getattr(self, name) for name in names} | changes


def _is_encoding(name: str) -> bool:
    """Return whether Python has an encoding of text with this name."""
    with suppress(LookupError, ValueError):  # ValueError: a null character in the name
        return bool(" ".encode(name))
    return False


def _reads_any_file(encoding: str) -> bool:
    with suppress(UnicodeError):
        return bool(bytes(range(256)).decode(encoding))
    return False


def _default_directory(corpus: str, tokenizer: str, vocabulary: int) -> str:
    """Return data/<corpus>-<tokenizer>.

    Of a path, only the last part without its extensions is used. Characters other than letters, digits, _ and + become
    a hyphen.
    """

    def name(path: str) -> str:
        parts = [re.sub(r"[^\w+]+", "-", part.partition(".")[0]) for part in re.split("[/:]", without_query(path))]
        return next(filter(None, (part.strip("-") for part in reversed(parts))), "corpus")

    if tokenizer == TRAINED_HERE:
        tokenizer = f"{tokenizer}{vocabulary}"
    stem = Path(tokenizer.removeprefix(MODEL_PREFIX).removesuffix("/tokenizer.json")).stem
    return f"data/{name(corpus.removeprefix(HUB))}-{stem}"
