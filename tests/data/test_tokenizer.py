from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kerple.data.tokenizer import encode, load_tokenizer, split_text, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer(documents: list[str]) -> Tokenizer:
    return train_tokenizer(documents, 400)


def test_training_twice_gives_the_same_tokenizer(tokenizer: Tokenizer, documents: list[str]) -> None:
    assert train_tokenizer(documents, 400).to_str() == tokenizer.to_str()
    assert tokenizer.get_vocab_size() == 400


@given(st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_every_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    (ids,) = encode(tokenizer, [text])

    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_name_of_the_end_of_text_token_in_a_text_is_only_letters(tokenizer: Tokenizer) -> None:
    (ids,) = encode(tokenizer, ["a<|endoftext|>b"])

    assert tokenizer.token_to_id("<|endoftext|>") not in ids


@given(st.text(alphabet="ab1 .\n\t é'", max_size=120), st.integers(3, 30))
@settings(max_examples=500, deadline=None)
def test_a_cut_before_a_break_changes_no_token(tokenizer: Tokenizer, text: str, size: int) -> None:
    pieces = list(split_text(text, size))

    assert "".join(pieces) == text
    assert all(0 < len(piece) <= size for piece in pieces) or text == ""
    clean = all(after[0] in " \n" and not before[-1].isspace() for before, after in pairwise(pieces))
    if clean:  # a text without a break within `size` characters has to be cut somewhere
        assert [i for ids in encode(tokenizer, pieces) for i in ids] == next(encode(tokenizer, [text]))


@pytest.mark.parametrize("content", ["", "{}", "[1, 2]", '{"model": 3}', "\x00"])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer: .*could not be loaded"):
        load_tokenizer(str(path))


def test_a_directory_or_a_missing_file(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="no file"):
        load_tokenizer(str(tmp_path / "nothing.json"))
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    assert load_tokenizer(str(tmp_path)).to_str() == tokenizer.to_str()


def test_a_vocabulary_smaller_than_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="below 257"):
        train_tokenizer(["text"], 256)
