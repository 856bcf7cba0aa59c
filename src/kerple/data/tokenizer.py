"""Tokenizers: training of a byte-level BPE, loading of Hugging Face tokenizers, and encoding of strings."""

import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from kerple.base.errors import UserError, machine_error, require
from kerple.config.files import read_mapping

END_OF_TEXT = "<|endoftext|>"
DOCUMENT_ENDS = (END_OF_TEXT, "<|end_of_text|>")  # a chat model with such a token may declare the end of a turn instead
OTHER_ENDS = ("</s>", "<eos>", "[SEP]")
DECLARATIONS = {
    "manifest.json": "end_of_text",  # of prepared shards
    "tokenizer_config.json": "eos_token",
    "special_tokens_map.json": "eos_token",
    "generation_config.json": "eos_token_id",
    "config.json": "eos_token_id",
}
"""Files beside a tokenizer that declare end-of-text tokens, in order of precedence, and their keys."""
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
    require(vocabulary >= 257, "data.vocabulary", vocabulary, f"at least 257, for 256 bytes and {END_OF_TEXT}")
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
        from kerple.hf.pretrained_files import find_model  # needs optional packages
        from kerple.hf.pretrained_tokenizer import read_tokenizer

        return read_tokenizer(find_model(source.removeprefix(MODEL_PREFIX)))
    path = tokenizer_file(source)
    try:
        if path.is_file():
            return Tokenizer.from_str(path.read_text(encoding="utf-8"))
        if path.suffix == ".json" or path.is_absolute() or source.startswith("."):
            raise FileNotFoundError(f"there is no file {path}")
        return Tokenizer.from_pretrained(source)
    except Exception as error:  # the library raises many kinds of errors
        if machine_error(error):
            raise
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


def end_of_text(tokenizer: Tokenizer, source: str, declared: Sequence[str | int] = ()) -> int:
    """Return the id of the end-of-text token. It is the first of these tokens that the tokenizer has:

    1. that of the shards in the folder of the tokenizer,
    2. one of `DOCUMENT_ENDS`,
    3. a token that is declared by its name, or a special token that is declared by its id,
    4. one of `OTHER_ENDS`,
    5. any other declared token. Its id is often the default of the model's class.

    Args:
        tokenizer: The tokenizer.
        source: Source of the tokenizer as in `load_tokenizer`, or its name in the error message. The files
            `DECLARATIONS` in its folder declare tokens.
        declared: Names and ids of other declared tokens, which precede those of the folder.

    Raises:
        UserError: The tokenizer has none of these tokens, or a file cannot be read.
    """
    files = _declarations(source)
    entries: list[Any] = [files[name].get(key) for name, key in DECLARATIONS.items() if name in files]
    found = [end for entry in [[*declared], *entries] for end in (entry if isinstance(entry, list) else [entry])]
    named = [end.get("content") if isinstance(end, dict) else end for end in found]
    ends = [end for end in named if isinstance(end, str) or (type(end) is int and 0 <= end < 1 << 32)]
    # the files beside the tokenizer of the shards may be missing in their folder
    of_shards = [end for end in [files.get("manifest.json", {}).get("end_of_text")] if end in ends]
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    reliable = [end for end in ends if isinstance(end, str) or end in special]
    # transformers may add a token that the model does not have
    rows = size if isinstance(size := files.get("config.json", {}).get("vocab_size"), int) else math.inf
    for end in (*of_shards, *DOCUMENT_ENDS, *reliable, *OTHER_ENDS, *ends):
        number = tokenizer.token_to_id(end) if isinstance(end, str) else end
        if number is not None and number < rows and tokenizer.id_to_token(number) is not None:
            return number
    names = ", ".join(map(str, (*DOCUMENT_ENDS, *OTHER_ENDS, *ends)))
    limit = f" with an id below {rows}" if rows < math.inf else ""
    advice = "or declare the name of another as eos_token in its tokenizer_config.json"
    raise UserError(f"data.tokenizer: got {source!r}, expected an end-of-text token{limit}: {names}; {advice}")


def _declarations(source: str) -> dict[str, dict[str, Any]]:
    """Return the content of the files `DECLARATIONS` in the folder of a tokenizer or model, by name."""
    if source.startswith(MODEL_PREFIX):
        from kerple.hf.pretrained_files import find_model  # needs optional packages
        from kerple.hf.pretrained_tokenizer import read_declaration

        model = find_model(source.removeprefix(MODEL_PREFIX))
        return {name: read_declaration(model, name) for name in DECLARATIONS}
    path = tokenizer_file(source)  # a tokenizer with another name than tokenizer.json may be in any folder
    files = [path.with_name(name) for name in DECLARATIONS] if path.name == "tokenizer.json" else []
    return {file.name: read_mapping(file) for file in files if file.is_file()}


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
