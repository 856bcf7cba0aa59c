"""Tokenizers of pretrained models, and the tokens that they insert before a text."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kerple.base.errors import UserError
from kerple.hf import need
from kerple.hf.source import ModelSource, library_errors, read_json_file

TOKENIZERS = {"tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json"}
AROUND = ("post_processor", "truncation", "padding")  # parts of a tokenizer that do not change the tokens of a text


def has_tokenizer(source: ModelSource) -> bool:
    """Whether the folder of a model has a file of a tokenizer; True for a model on the hub."""
    folder = Path(source.location)
    return source.gguf is not None or not folder.is_dir() or bool({path.name for path in folder.iterdir()} & TOKENIZERS)


@lru_cache(maxsize=2)  # reading one from GGUF takes seconds
def _read_tokenizer(source: ModelSource) -> Any:
    need()
    if not has_tokenizer(source):
        raise UserError(f"tokenizer: {source.name} has none; copy the model's tokenizer.json into its folder")
    from transformers import AutoTokenizer

    with library_errors(source, "tokenizer"):
        return AutoTokenizer.from_pretrained(source.location, use_fast=True, trust_remote_code=False, **source.files)


def bos_token(source: ModelSource) -> int | None:
    """Id of the token that the model's tokenizer inserts before a text, or None.

    If there is a tokenizer.json, transformers 5 ignores ``add_bos_token`` in tokenizer_config.json. This function reads
    it, because the model may have been trained with such a token.

    Raises:
        UserError: As `read_tokenizer`.
    """
    wrapper = _read_tokenizer(source)
    plain, whole = (wrapper.encode("a", add_special_tokens=special) for special in (False, True))
    if len(whole) > len(plain) and whole[:1] != plain[:1]:
        return whole[0]
    asked = source.gguf is None and read_json_file(source, "tokenizer_config.json").get("add_bos_token")
    return wrapper.bos_token_id if asked else None


def read_tokenizer(source: ModelSource) -> Tokenizer:
    """Read the tokenizer of a model.

    Raises:
        UserError: If the model has no tokenizer, or a tokenizer that needs the model's own code.
    """
    wrapper = _read_tokenizer(source)
    tokenizer = getattr(wrapper, "backend_tokenizer", None)
    if not isinstance(tokenizer, Tokenizer):
        name = type(wrapper).__name__
        raise UserError(f"tokenizer: the {name} of {source.name} has no tokenizer.json; convert it to a fast tokenizer")
    return tokenizer


def same_tokens(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether two tokenizers encode a text equally, apart from truncation, padding and special tokens at its ends."""
    first, second = (json.loads(tokenizer.to_str()) | dict.fromkeys(AROUND) for tokenizer in (one, other))
    return first == second


def check_tokenizer(folder: Any, source: ModelSource) -> None:
    """Check that the shards of a `kerple.data.shards.Folder` were made with a model's tokenizer.

    Raises:
        UserError: If they were made with another tokenizer, or the model has none.
    """
    if not same_tokens(folder.tokenizer(), read_tokenizer(source)):
        tokenizer = folder.manifest.settings.get("tokenizer", "another one")
        given = f"the shards in {folder.directory} were made with {tokenizer}, not with the tokenizer of {source.name}"
        raise UserError(
            f"tokenizer: {given}; set data.tokenizer to hf:{source.name} and data.directory to a new folder"
        )
