"""The four terms add up to the scores the model computes."""

import pytest
import torch
from torch import Tensor

from kerple.analyses.four_terms import TERMS, four_terms, spread
from kerple.model import Transformer
from kerple.positions import Shape, strategies

LLAMA = {"norm": "rms", "bias": False, "kv_heads": 2, "embedding_norm": True}


@torch.no_grad()
@pytest.mark.parametrize(("name", "options"), [("Learned", {}), ("Sinusoidal", LLAMA)])
def test_terms_add_up_to_the_models_own_scores(name: str, options: dict) -> None:
    network = Transformer(Shape(32, 4, 32), 2, 50, strategies()[name], init=0.2, **options).eval()
    tokens = torch.randint(50, (2, 12))
    # norms start at 1, biases at 0, a table of positions near it: give them something to say
    for parameter in (*network.positions.parameters(), *(p for p in network.parameters() if p.ndim == 1)):
        parameter.normal_()
    seen: list[Tensor] = []
    hook = network.blocks[0].attention.qkv.register_forward_hook(lambda m, i, output: seen.append(output))
    network(tokens)
    hook.remove()
    q, k, _ = network.blocks[0].attention.split(seen[0])  # (B, H, T, δ), (B, G, T, δ)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    expected = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    terms = four_terms(network, tokens)
    assert set(terms) == {*TERMS, "rest"}
    torch.testing.assert_close(sum(terms.values()), expected, rtol=1e-4, atol=1e-4)
    biased = network.blocks[0].attention.qkv.bias is not None
    assert all(float(term.abs().max()) > 1e-3 for name, term in terms.items() if biased or name != "rest")


@torch.no_grad()
def test_each_term_depends_on_what_it_is_named_after(tiny_network) -> None:
    network, same = tiny_network("Learned"), torch.full((1, 12), 7)
    terms = four_terms(network, same)
    network.positions[0].table.zero_()
    without = four_terms(network, same)
    assert not any(without[t].any() for t in TERMS[1:])  # no position, no term with one
    torch.testing.assert_close(without["word-word"], without["word-word"][..., :1, :1].expand(-1, -1, 12, 12))
    assert terms["position-position"].std() > 0
    network.positions[0].table.normal_()
    network.embedding.weight.zero_()
    wordless = four_terms(network, same)
    assert not any(wordless[t].any() for t in TERMS[:3])
    assert wordless["position-position"].any()


def test_words_that_the_strategy_scales_are_still_words(tiny_network) -> None:
    scaled, plain = tiny_network("Sinusoidal", scaled=True), tiny_network("Sinusoidal")
    plain.load_state_dict(scaled.state_dict())
    plain.embedding.weight.data *= 32**0.5  # the same model
    tokens = torch.randint(50, (2, 12))
    expected, terms = four_terms(plain, tokens), four_terms(scaled, tokens)
    for name in expected:
        torch.testing.assert_close(terms[name], expected[name], rtol=1e-4, atol=1e-5)


def test_spread_ignores_the_future_and_what_softmax_ignores() -> None:
    term = torch.zeros(1, 1, 3, 3)
    term[0, 0] = torch.tensor([[5.0, 99.0, 99.0], [1.0, 3.0, 99.0], [0.0, 0.0, 3.0]])
    # rows around their means: 0 | -1, 1 | -1, -1, 2: squares 0 + 2 + 6 over 6 entries
    assert float(spread(term)) == pytest.approx((8 / 6) ** 0.5)
    assert float(spread(term + torch.tensor([[1.0], [20.0], [300.0]]))) == pytest.approx((8 / 6) ** 0.5)
