"""Tokenizers: training of a byte-level BPE, loading of Hugging Face tokenizers, and encoding of strings."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from kerple.base.errors import UserError

END_OF_TEXT = "<|endoftext|>"
TRAINED_HERE = "bpe"  # value of data.tokenizer for a tokenizer that the preparation trains
MODEL_PREFIX = "hf:"  # prefix of pretrained models in data.tokenizer
BYTE = re.compile("<0x[0-9A-F]{2}>")  # the token of a single byte in SentencePiece vocabularies
LONGEST_RUN = 256  # largest number of bytes of a pre-token in training; pre-tokens of ordinary text are shorter


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE like GPT-2's: 256 bytes, an end-of-text token, and merges learned from `texts`.

    A pre-token is a run of letters, of digits, of whitespace or of other characters. The training time of a pre-token
    grows with the square of its length. In training, pre-tokens of more than `LONGEST_RUN` bytes are therefore cut into
    pieces of this size.

    Args:
        texts: Training texts.
        vocabulary: Number of entries. There are fewer if the texts have fewer pairs to merge.

    Raises:
        UserError: `vocabulary` leaves no room for the bytes and the end-of-text token.
    """
    if vocabulary < 257:
        raise UserError(f"data.vocabulary: got {vocabulary}, expected at least 257, for 256 bytes and {END_OF_TEXT}")
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces = pre_tokenizers.Split(Regex(f".{{{LONGEST_RUN}}}"), "isolated")  # each byte is a character here
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([byte_level, pieces])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(byte_level.alphabet())
    options: Any = {"vocab_size": vocabulary, "special_tokens": [END_OF_TEXT], "initial_alphabet": alphabet}
    trainer = trainers.BpeTrainer(**options, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = byte_level
    return tokenizer


def load_tokenizer(source: str) -> Tokenizer:
    """Load a tokenizer.

    Args:
        source: A `tokenizer.json`, a folder with one, a name on the Hugging Face hub such as `gpt2`, or `hf:` and the
            folder, GGUF file or name of a pretrained model.

    Raises:
        UserError: `source` does not exist, the hub cannot be reached, or the file is not a tokenizer.
    """
    if source.startswith(MODEL_PREFIX):
        from kerple.hf.pretrained_files import find_model, read_tokenizer  # needs optional packages

        return read_tokenizer(find_model(source.removeprefix(MODEL_PREFIX)))
    path = tokenizer_file(source)
    try:
        if path.is_file():
            return Tokenizer.from_str(path.read_text(encoding="utf-8"))
        if path.suffix == ".json" or path.is_absolute() or source.startswith("."):
            raise FileNotFoundError(f"there is no file {path}")
        return Tokenizer.from_pretrained(source)
    except Exception as error:  # the library raises many kinds of errors
        expected = f"{TRAINED_HERE!r} to train one, a tokenizer.json or its folder, or a name on the Hugging Face hub"
        given = f"got {source!r}, which could not be loaded ({error})"
        raise UserError(f"data.tokenizer: {given}; expected {expected}") from error


def tokenizer_file(source: str) -> Path:
    """Return the path of a tokenizer's file: ``source``, or tokenizer.json in this folder. The file may not exist."""
    return Path(source, "tokenizer.json") if os.path.isdir(source) else Path(source)


def without_truncation(tokenizer: Tokenizer) -> Tokenizer:
    """Disable the truncation and padding that a tokenizer's file may enable, and return the same tokenizer object."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def end_of_text(tokenizer: Tokenizer, source: str) -> int:
    """Return the id of the end-of-text token, found by its usual names.

    Args:
        tokenizer: The tokenizer.
        source: Name of the tokenizer in the error message.

    Raises:
        UserError: The tokenizer has no token of these names.
    """
    names = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "[SEP]")
    for name in names:
        if (number := tokenizer.token_to_id(name)) is not None:
            return number
    raise UserError(f"data.tokenizer: got {source!r}, expected one with an end-of-text token: {', '.join(names)}")


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Return the largest token id plus one. It is more than the number of tokens if the ids have gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def token_bytes(tokenizer: Tokenizer) -> list[int]:
    """Return the number of bytes of text of each token id, from 0 to the largest; 0 for special tokens and gaps.

    The numbers are exact for byte-level vocabularies, in which a token may be part of a character, and for byte tokens
    and added tokens of other vocabularies. Any other token is decoded after the tokens of "a". Its number is the number
    of UTF-8 bytes by which the decoded text is longer than "a".
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    byte_level = tokenizer.decoder is not None and b'"ByteLevel"' in tokenizer.decoder.__getstate__()
    prefix = tokenizer.encode("a", add_special_tokens=False).ids
    start = len(tokenizer.decode(prefix, skip_special_tokens=False).encode())
    sizes = [0] * vocabulary_size(tokenizer)
    for token, i in vocabulary.items():
        if i in added:
            sizes[i] = 0 if added[i].special else len(token.encode())
        elif byte_level:
            sizes[i] = len(token)  # the alphabet of a byte-level vocabulary has a character for each byte
        else:
            text = tokenizer.decode([*prefix, i], skip_special_tokens=False)
            sizes[i] = 1 if BYTE.fullmatch(token) else max(0, len(text.encode()) - start)
    return sizes


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a string. The name of a special token in the string is encoded as ordinary characters."""
    without_truncation(tokenizer).encode_special_tokens = True
    return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
