"""Tokenizers of pretrained models, and the token that they put before a text."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kerple.base.errors import UserError
from kerple.hf import need
from kerple.hf.source import ModelSource, read_json_file, reading

TOKENIZERS = {"tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json"}
AROUND = ("post_processor", "truncation", "padding")  # parts of a tokenizer that do not change the tokens of a text


def has_tokenizer(source: ModelSource) -> bool:
    """Whether a model in a folder has a file of a tokenizer; for a model on the hub, True."""
    folder = Path(source.location)
    return source.gguf is not None or not folder.is_dir() or bool({path.name for path in folder.iterdir()} & TOKENIZERS)


@lru_cache(maxsize=2)  # reading one from GGUF takes seconds
def _read_tokenizer(source: ModelSource) -> Any:
    need()
    if not has_tokenizer(source):
        raise UserError(
            f"tokenizer: {source.name} comes without one; expected tokenizer.json beside its config.json: copy it from "
            "where the model was made"
        )
    from transformers import AutoTokenizer

    with reading(source, "tokenizer"):
        return AutoTokenizer.from_pretrained(source.location, use_fast=True, trust_remote_code=False, **source.files)


def bos_token(source: ModelSource) -> int | None:
    """Id of the token that the model's tokenizer puts before a text, or None.

    transformers 5 ignores ``add_bos_token`` in tokenizer_config.json if there is a tokenizer.json, although a model may
    have been trained with it.

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
    """Read the model's tokenizer, as a `tokenizers.Tokenizer`.

    Raises:
        UserError: If the model has no tokenizer, or one that needs the model's own code.
    """
    wrapper = _read_tokenizer(source)
    tokenizer = getattr(wrapper, "backend_tokenizer", None)
    if not isinstance(tokenizer, Tokenizer):
        raise UserError(f"tokenizer: that of {source.name} ({type(wrapper).__name__}) has no tokenizer.json; make one")
    return tokenizer


def same_tokens(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether two tokenizers encode a text alike, special tokens around it and a limit of its length aside."""
    first, second = (json.loads(tokenizer.to_str()) | dict.fromkeys(AROUND) for tokenizer in (one, other))
    return first == second


def check_tokenizer(folder: Any, source: ModelSource) -> None:
    """Check that the shards of a `kerple.data.shards.Folder` were made with a model's tokenizer.

    Raises:
        UserError: They were made with another, or the model has none.
    """
    if not same_tokens(folder.tokenizer(), read_tokenizer(source)):
        tokenizer = folder.manifest.settings.get("tokenizer", "another one")
        raise UserError(
            f"tokenizer: the shards in {folder.directory} were made with {tokenizer}, not with the tokenizer "
            f"of {source.name}; give data.directory another folder and data.tokenizer hf:{source.name}"
        )
