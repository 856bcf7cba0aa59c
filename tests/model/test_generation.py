"""Generation against a network without a cache."""

import pytest
import torch
from torch import Tensor, nn

from kerple.model import Transformer
from kerple.model.generation import choose, fill_in, generate
from kerple.positions import Shape, strategies
from kerple.positions.visibility import EVERYTHING, Visibility

VOCABULARY = 30


def network(name: str) -> Transformer:
    # large weights, so that generated tokens depend on the prompt
    return Transformer(Shape(16, 2, 64), 2, VOCABULARY, strategies()[name], init=0.16).eval()


# with each kind of cache, and without a cache; `kerple.testing` checks for all strategies that a cache changes no logit
@torch.no_grad()
@pytest.mark.parametrize("name", ["KerpleLog", "FoX", "LayerPattern", "RandomizedPositions"])
def test_fill_in_equals_generation_row_by_row(name: str) -> None:
    """Prompts of different lengths with copied tokens inside the answer, against single rows without a cache."""
    model, tokens = network(name), torch.randint(VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(2))
    scored = torch.zeros(4, 15, dtype=torch.bool)
    scored[0, 3:9] = scored[1, 6:15] = scored[2, [4, 6, 8]] = True
    result = fill_in(model, tokens, scored)
    for row in range(4):
        expected = tokens[row].tolist()
        for t in range(15):
            if scored[row, t]:
                expected[t + 1] = int(model(torch.tensor([expected[: t + 1]]))[0, -1].argmax())
        assert result[row].tolist() == expected
    assert (result != tokens).any()


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "visibility"),
    [
        ("KerpleLog", EVERYTHING),
        ("KerpleLog", Visibility(6)),
        pytest.param("LayerPattern", EVERYTHING, marks=pytest.mark.slow),
        pytest.param("RandomizedPositions", EVERYTHING, marks=pytest.mark.slow),
    ],
)
def test_generation_begins_a_new_document_after_its_end(name: str, visibility: Visibility) -> None:
    model, random = network(name), torch.Generator().manual_seed(3)
    prompt = torch.randint(1, VOCABULARY, (2, 14), generator=random)
    prompt[:, 9] = 0
    options = {"visibility": visibility, "document_end": 0}
    tokens = torch.cat([prompt, torch.stack(list(generate(model, prompt, 12, **options)), 1)], 1)
    for row in tokens.tolist():
        for t in range(14, 26):
            start = max(i for i in range(t) if row[i] == 0)  # of the document, whose first input is the end token
            assert row[t] == int(model(torch.tensor([row[start:t]]), visibility)[0, -1].argmax())
    alone = list(generate(model, prompt, 12, visibility=visibility))
    assert visibility != EVERYTHING or not torch.equal(torch.stack(alone, 1), tokens[:, 14:])


class Successor(nn.Module):
    """Minimal network without a cache that predicts token t + 1 after token t."""

    prefix_consistent = False

    def forward(self, tokens: Tensor, visibility: Visibility, cache: None = None, last: int | None = None) -> Tensor:
        return nn.functional.one_hot((tokens + 1) % VOCABULARY, VOCABULARY).float()


def test_each_row_stops_at_its_stop_token() -> None:
    steps = list(generate(Successor(), torch.tensor([[4], [7]]), 50, stop=9))
    assert torch.stack(steps, 1).tolist() == [[5, 6, 7, 8, 9], [8, 9, 9, 9, 9]]
    assert len(list(generate(Successor(), torch.tensor([[4]]), 3, stop=9))) == 3


def test_sampling_follows_the_probabilities() -> None:
    probabilities, draws, random = torch.tensor([0.5, 0.3, 0.15, 0.05]), 20_000, torch.Generator().manual_seed(0)
    squares = probabilities**2
    for options, expected in (
        ({"temperature": 1.0}, probabilities),
        ({"temperature": 0.5}, squares / squares.sum()),
        ({"temperature": 1.0, "top_k": 2}, torch.tensor([0.625, 0.375, 0, 0])),
        ({"temperature": 1.0, "top_p": 0.7}, torch.tensor([0.625, 0.375, 0, 0])),
        ({"temperature": 1.0, "top_p": 0.4}, torch.tensor([1.0, 0, 0, 0])),
        ({}, torch.tensor([1.0, 0, 0, 0])),
    ):
        chosen = choose(probabilities.log().expand(draws, 4), generator=random, **options)
        torch.testing.assert_close(chosen.bincount(minlength=4) / draws, expected, rtol=0, atol=0.015)


def test_a_temperature_close_to_0_selects_the_most_likely_token() -> None:
    logits = torch.tensor([[-40.0, 60.0, 59.0], [3.0, -1e4, 2.0]])
    assert choose(logits, 1e-40).tolist() == choose(logits, top_p=0.9).tolist() == [1, 0]
