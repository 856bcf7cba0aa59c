"""Places of tokens: against what the definition says of a text, and causal for every task that has them."""

import numpy as np
import pytest
import torch

from kerple.base.errors import UserError
from kerple.tasks import Addition, Copy, ModularSum, Multiplication, Parity, Polynomial, Reverse, Task, TaskData
from kerple.tasks.places import abacus
from kerple.tasks.vocabulary import CHARACTERS, PAD_ID, encode

PLACED: dict[str, Task] = {
    "addition": Addition(order="reversed", equal=True),
    "addition, padded": Addition(order="reversed", padded=True),
    "multiplication": Multiplication(order="reversed"),
    "copy": Copy(),
    "reverse": Reverse(),
}


def places(task: Task, text: str) -> list[int]:
    return task.places(torch.tensor([encode(text)]))[0].tolist()


@pytest.mark.parametrize(
    ("task", "text", "expected"),
    [
        # 321 + 54 = 375, last digits first: a place for each significance, one less for the sign before a number
        ("addition", "«123+45=573»", [0, 2, 3, 4, 1, 2, 3, 1, 2, 3, 4, 0]),
        ("addition, padded", "«12+90=120··", [0, 2, 3, 4, 2, 3, 1, 2, 3, 4, 0, 0]),  # the + at that of the third digit
        ("multiplication", "«63*7=252", [0, 2, 3, 1, 0, 1, 2, 3, 4]),
        ("copy", "«cab=cab", [0, 2, 3, 4, 1, 2, 3, 4]),
        ("reverse", "«cab=bac»", [0, 2, 3, 4, 5, 4, 3, 2, 0]),
    ],
)
def test_places_are_those_of_the_definition(task, text, expected):
    assert places(PLACED[task], text) == expected


@pytest.mark.parametrize("name", PLACED)
def test_what_belongs_together_has_one_place(name):
    rng = np.random.default_rng(0)
    for n in (1, 2, 5, 9):
        example = PLACED[name].example(n, rng)
        found = places(PLACED[name], example.text)
        start = len(example.prompt) + 2  # of the answer
        for i, place in enumerate(found[start : start + min(n, len(example.answer))]):
            # the operand's digit of that significance, the letter that is repeated
            partner = n - 1 - i if name == "reverse" else i
            assert place == found[1 + partner] > 1
            if name == "addition, padded":
                assert place == found[1 + n + 1 + i]
        assert max(found) <= n + 2


def test_digits_are_counted_in_every_number():
    text = "«-2:3*x^2-10*x^345=07··"
    expected = [0, 0, 1, 0, 1, 0, 0, 0, 1, 0, 1, 2, 0, 0, 0, 1, 2, 3, 0, 1, 2, 0, 0]
    assert abacus(torch.tensor([encode(text)]))[0].tolist() == expected


@pytest.mark.parametrize("name", [*PLACED, "abacus"])
def test_places_are_causal(name):
    """Whatever follows, and whatever the tokens are, the places of a prefix are the prefix of the places."""
    function = abacus if name == "abacus" else PLACED[name].places
    generator, rng = torch.Generator().manual_seed(0), np.random.default_rng(0)
    random = torch.randint(len(CHARACTERS), (200, 24), generator=generator)
    written = [encode(PLACED.get(name, Addition()).example(4, rng).text) for _ in range(50)]
    longest = max(map(len, written))
    padded = torch.tensor([ids + [PAD_ID] * (longest - len(ids)) for ids in written])
    for tokens in (random, padded):
        whole = function(tokens)
        assert whole.dtype == torch.int64
        assert 0 <= int(whole.min()) <= int(whole.max()) <= tokens.shape[1] + 1
        for end in range(1, tokens.shape[1]):
            torch.testing.assert_close(function(tokens[:, :end]), whole[:, :end])
            changed = torch.cat([tokens[:, :end], random[: len(tokens), : tokens.shape[1] - end]], 1)
            torch.testing.assert_close(function(changed)[:, :end], whole[:, :end])


def test_a_task_without_places_says_so_in_one_line():
    with pytest.raises(UserError, match="places"):
        TaskData(Addition(), 999).places("coupled")
    with pytest.raises(UserError, match="got 'copy', expected one with numbers"):
        TaskData(Copy(), 60).places("abacus")
    for task in (Addition(), Multiplication(), ModularSum(), Parity(), Polynomial()):
        assert TaskData(task, 999).places("abacus") is abacus


def test_places_that_a_later_token_changes_are_refused():
    class FromTheRight(Addition):
        """Digits of unpadded numbers counted from their end, which is not there yet."""

        def places(self, tokens: torch.Tensor) -> torch.Tensor:
            return abacus(tokens.flip(1)).flip(1)

    with pytest.raises(UserError, match="got 'from the right', whose places are not causal"):
        TaskData(FromTheRight(), 64).places("coupled")
