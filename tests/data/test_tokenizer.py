import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kerple.data import tokenizer as module
from kerple.data.tokenizer import cut_runs, encode, token_bytes, train_tokenizer

# as sentencepiece makes them: ▁ for a space, a token for each byte that no piece has
PIECES = Tokenizer(
    models.BPE(
        {piece: i for i, piece in enumerate([f"<0x{b:02X}>" for b in range(256)] + ["▁", "a", "b", "é", "▁a", "ab"])},
        [("▁", "a"), ("a", "b")],
        byte_fallback=True,
    )
)
PIECES.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
PIECES.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


@pytest.fixture(scope="module")
def tokenizer(documents):
    return train_tokenizer(documents, 400)


@given(st.lists(st.text(alphabet="ab1-. \n\té", min_size=1, max_size=20) | st.sampled_from("ab1- \n"), max_size=20))
@settings(max_examples=100, deadline=None)
def test_only_what_is_longer_than_a_run_may_be_is_cut(parts):
    text = "".join(part * (300 if len(part) == 1 else 1) for part in parts)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)

    def words(text: str) -> list[str]:
        return [text[first:end] for _, (first, end) in byte_level.pre_tokenize_str(text)]

    pieces = list(cut_runs(text, byte_level))
    assert "".join(pieces) == text
    expected = [w[i : i + module.LONGEST_RUN] for w in words(text) for i in range(0, len(w), module.LONGEST_RUN)]
    assert [word for piece in pieces for word in words(piece)] == expected


@given(st.text(max_size=200))
@settings(max_examples=100, deadline=None)
def test_every_text_comes_back_and_its_tokens_have_its_bytes(tokenizer, text):
    ids, sizes = encode(tokenizer, text), token_bytes(tokenizer)  # most characters are parts: there are 143 merges
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert sum(sizes[i] for i in ids) == len(text.encode())


@given(st.lists(st.text(alphabet="ab é猫z.", min_size=1, max_size=8), max_size=9).map(" ".join))
@settings(max_examples=100, deadline=None)
def test_the_bytes_of_pieces_with_bytes_to_fall_back_to(text):
    sizes = token_bytes(PIECES)
    ids = PIECES.encode(text, add_special_tokens=False).ids
    assert sum(sizes[i] for i in ids) == len(text.encode())


def test_special_tokens_have_no_bytes_and_added_ones_their_own(tokenizer):
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.add_tokens(["é é"])
    sizes = token_bytes(copy)
    assert sizes[copy.token_to_id("é é")] == 5
    assert sizes[copy.token_to_id("<|endoftext|>")] == 0


def test_the_name_of_the_end_of_text_token_in_a_text_is_only_letters(tokenizer):
    ids = encode(tokenizer, "a<|endoftext|>b")
    assert tokenizer.token_to_id("<|endoftext|>") not in ids


@pytest.mark.parametrize("content", ["", '{"model": 3}', "\x00"])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer: .*could not be loaded"):
        module.load_tokenizer(str(path))
