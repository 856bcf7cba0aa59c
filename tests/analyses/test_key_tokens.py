"""Key tokens by the formula of the paper, target by target, and carried over between tokenisations."""

import pytest
import torch
from tokenizers import Tokenizer

from kerple.analyses.key_tokens import Criterion, byte_spans, carried_over, key_targets, spelling
from kerple.data.tokenizer import train_tokenizer

BLOCK, SHORT, STRIDE = 24, 8, 3


class Copier:
    """Finds a token likely if it was among its inputs so far: a network for which far context matters."""

    def losses(self, tokens, offset=0, window=None, last=None):
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        seen = torch.stack([(inputs[:, : t + 1] == targets[:, t, None]).any(1) for t in range(targets.shape[1])], 1)
        losses = torch.where(seen, 0.5, 6.0) + 0.01 * targets
        return losses if last is None else losses[:, -last:]


def test_keys_are_what_the_formula_says() -> None:
    tokens = torch.randint(30, (3, BLOCK + 1), generator=torch.Generator().manual_seed(0))
    criterion = Criterion(SHORT, STRIDE, gain=2.0, likely=-0.705)
    keys, network = key_targets(Copier(), tokens, criterion), Copier()
    expected = torch.zeros(3, BLOCK, dtype=torch.bool)
    for row in range(3):
        for t in range(SHORT, BLOCK):
            end = SHORT
            while end <= t:
                end += STRIDE
            end = min(end, BLOCK)  # the short context whose step scores t
            long = -float(network.losses(tokens[row : row + 1, : t + 2])[0, -1])
            short = -float(network.losses(tokens[row : row + 1, end - SHORT : t + 2])[0, -1])
            expected[row, t] = long - short > 2.0 and long > -0.705
    assert torch.equal(keys, expected)
    assert keys.any()
    assert not key_targets(Copier(), tokens, Criterion(SHORT, STRIDE, 2.0, likely=-0.4)).any()
    # the targets of the first short context are never key: both contexts are the same for them
    assert not key_targets(Copier(), tokens, Criterion(SHORT, STRIDE, gain=-1.0, likely=-9.0))[:, :SHORT].any()


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"stride: got 9, expected 1\.\.8"):
        Criterion(8, 9)
    with pytest.raises(ValueError, match="short: got 24, expected less than 24"):
        key_targets(Copier(), torch.zeros(1, BLOCK + 1, dtype=torch.int64), Criterion(BLOCK, 1))


def test_keys_of_one_tokenisation_are_those_that_share_a_byte_in_another() -> None:
    #          ab   c    é      d
    spans = [(0, 2), (2, 3), (3, 5), (5, 6)]
    own = [b"a", b"bc", b"", b"\xc3", b"\xa9d"]
    assert carried_over(own, spans, [False, False, True, False]) == [False, False, False, True, True]
    assert carried_over(own, spans, [True, False, False, False]) == [True, True, False, False, False]
    assert carried_over(own, spans, [False] * 4) == [False] * 5


def test_tokens_are_spelt_in_the_bytes_they_were_made_of() -> None:
    text = "def ünï(x):\n\treturn 'čau 🙂' # \x00\x7f\xad"
    tokenizer = train_tokenizer([text], 300)
    ids = tokenizer.encode(text).ids
    ending = tokenizer.token_to_id("<|endoftext|>")
    spell = spelling(tokenizer, ending)
    assert b"".join(map(spell, ids)) == text.encode()
    assert spell(ending) == b""
    words = Tokenizer.from_str(tokenizer.to_str())
    words.add_tokens(["two words"])
    with pytest.raises(ValueError, match=r"\('two words'\) is not spelt in bytes"):
        spelling(words, ending)(words.token_to_id("two words"))


def test_spans_of_characters_are_spans_of_bytes_also_where_a_block_cuts_one() -> None:
    text = "aéb🙂".encode()[:-2].decode("utf-8", "surrogateescape")
    assert len(text) == 5
    assert byte_spans(text, [(0, 1), (1, 2), (2, 3), (3, 5)]) == [(0, 1), (1, 3), (3, 4), (4, 6)]
