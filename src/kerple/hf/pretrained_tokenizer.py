"""Functions that read the tokenizer of a pretrained model, its BOS token and its end-of-text token."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kerple.base.errors import UserError, require
from kerple.hf import need
from kerple.hf.pretrained_files import ModelSource, read_json_file, reading

TOKENIZER_FILES = {"tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json"}
ADD_BOS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"}
ADD_BOS |= {"tekken", "chameleon"}
"""Entries ``tokenizer.ggml.pre`` with which llama.cpp adds BOS, if the GGUF file has no ``add_bos_token``."""
IRRELEVANT = ("post_processor", "truncation", "padding")  # parts of a tokenizer that change only the ends of a text


def has_tokenizer(source: ModelSource) -> bool:
    """Return whether the folder of a model has a tokenizer; True for a GGUF file and for a model on the hub."""
    folder = Path(source.location)
    not_a_folder = source.gguf is not None or not folder.is_dir()
    return not_a_folder or any((folder / name).exists() for name in TOKENIZER_FILES)


@lru_cache(maxsize=2)  # reading a tokenizer from a GGUF file takes seconds
def _read_tokenizer(source: ModelSource) -> Any:
    """Return the tokenizer as an object of transformers."""
    need()
    if not has_tokenizer(source):
        raise UserError(f"model: got {source.name}, a folder without a tokenizer; copy its tokenizer.json into it")
    from transformers import AutoTokenizer  # an optional package

    with reading(source, "tokenizer"):
        return AutoTokenizer.from_pretrained(source.location, use_fast=True, trust_remote_code=False, **source.files)


def bos_token(source: ModelSource, advice: str = "") -> int | None:
    """Return the id of the token that the model's tokenizer adds before a text, or None.

    transformers 5 ignores ``add_bos_token`` in tokenizer_config.json if there is a tokenizer.json. This function uses
    ``add_bos_token``, because a model for which it is true was probably trained with a BOS token.

    Args:
        source: The model.
        advice: End of the error message about a tokenizer that adds several tokens, such as GLM's ``[gMASK]<sop>``.

    Raises:
        UserError: If the model has no tokenizer, or one that adds several tokens.
    """
    tokenizer = _read_tokenizer(source)
    plain, with_special = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    if len(with_special) > len(plain) and with_special[:1] != plain[:1]:
        given = f"{source.name}, whose tokenizer adds more than one token before a text"
        require(with_special[1 : 1 + len(plain)] == plain, "model", given, f"one, BOS{advice}")
        return with_special[0]
    if source.gguf is not None:
        return _gguf_bos(source)
    return tokenizer.bos_token_id if read_json_file(source, "tokenizer_config.json").get("add_bos_token") else None


def _gguf_bos(source: ModelSource) -> int | None:
    """Return the id of the token that llama.cpp adds before a text, or None."""
    from transformers.integrations.gguf import read_gguf_metadata  # an optional package

    entries, _ = read_gguf_metadata(str(source.gguf_path))
    default = entries.get("tokenizer.ggml.model") == "gpt2" and entries.get("tokenizer.ggml.pre") in ADD_BOS
    add_bos = entries.get("tokenizer.ggml.add_bos_token", default)
    return entries.get("tokenizer.ggml.bos_token_id") if add_bos else None


def read_declaration(source: ModelSource, name: str) -> dict[str, Any]:
    """Return the content of a JSON file of a model that declares its end-of-text token; {} if there is no such file.

    Entries of ``text_config`` are on the top level, too. For a GGUF file, which has no JSON files, its own entries are
    returned in place of config.json.
    """
    with reading(source, name):
        if source.gguf is None:
            content = dict(read_json_file(source, name))
            return dict(content.get("text_config") or {}) | content
        return _read_gguf_declaration(source) if name == "config.json" else {}


@lru_cache(maxsize=2)
def _read_gguf_declaration(source: ModelSource) -> dict[str, Any]:
    from transformers.integrations.gguf import read_gguf_metadata  # an optional package

    entries, _ = read_gguf_metadata(str(source.gguf_path), {"tokenizer.ggml.tokens"})
    rows = len(entries.get("tokenizer.ggml.tokens") or ())
    return {"eos_token_id": entries.get("tokenizer.ggml.eos_token_id"), "vocab_size": rows}


def read_tokenizer(source: ModelSource) -> Tokenizer:
    """Read the tokenizer of a model, as an object of the library tokenizers.

    Special tokens that are not added to a text, such as a padding token, never occur in an input. Their ids may
    therefore be outside the model's embedding.

    Raises:
        UserError: If the model has no tokenizer, one that is written in Python (a slow tokenizer), or one with an id
            outside the model's embedding.
    """
    tokenizer = _read_tokenizer(source)
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(fast, Tokenizer):
        given = f"whose tokenizer {type(tokenizer).__name__} has no tokenizer.json"
        raise UserError(f"model: got {source.name}, {given}; convert it to a fast tokenizer of transformers")
    rows = read_declaration(source, "config.json").get("vocab_size")
    unused = {i for i, token in fast.get_added_tokens_decoder().items() if token.special} - {*tokenizer.encode("a")}
    token, largest = max(fast.get_vocab().items(), key=lambda entry: -1 if entry[1] in unused else entry[1])
    given = f"{source.name}, whose tokenizer has the id {largest} ({token!r})"
    expected = f"ids below {rows}, its vocab_size; copy the tokenizer of this model"
    require(not isinstance(rows, int) or largest < rows, "model", given, expected)
    return fast


def same_tokens(one: Tokenizer, other: Tokenizer) -> bool:
    """Return whether two tokenizers have equal definitions, so that they encode every text equally.

    Truncation, padding and special tokens at the ends of a text may differ.
    """
    first, second = (json.loads(tokenizer.to_str()) | dict.fromkeys(IRRELEVANT) for tokenizer in (one, other))
    return first == second


def check_tokenizer(folder: Any, source: ModelSource) -> None:
    """Check that the shards of a `kerple.data.shards.Folder` were made with a model's tokenizer.

    Raises:
        UserError: If they were made with another tokenizer, or the model has none.
    """
    if not same_tokens(folder.tokenizer(), read_tokenizer(source)):
        tokenizer = folder.manifest.settings.get("tokenizer", "another tokenizer")
        given = f"the shards in {folder.location} were made with {tokenizer}, not with the tokenizer of {source.name}"
        raise UserError(f"data.tokenizer: {given}; set it to hf:{source.name}, and data.directory to a new folder")
