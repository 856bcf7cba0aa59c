"""The decoder around the strategies: sizes, initialisation, the cache, the window, the losses."""

import math

import pytest
import torch
import torch.nn.functional as F

from kerple.model import Transformer
from kerple.model.head import Pieces, target_losses
from kerple.positions import KerpleLog, Learned, NoPE, Shape, names


def test_parameter_count_of_the_paper() -> None:
    with torch.device("meta"):
        without = Transformer(Shape(768, 12, 512), 12, 50304, NoPE)
        kerple = Transformer(Shape(768, 12, 512), 12, 50304, KerpleLog)
    assert sum(p.numel() for p in without.parameters()) == 162_322_944
    assert sum(p.numel() for p in kerple.parameters()) == 162_322_944 + 24


@pytest.mark.parametrize(("options", "std"), [({}, 0.02), ({"init": 0.125}, 0.125)])
def test_initial_weights_have_the_recipe_s_spread(options: dict[str, float], std: float) -> None:
    network = Transformer(Shape(128, 4, 64), 8, 1000, NoPE, **options)
    block = network.blocks[3]
    for weight in (network.embedding.weight, network.head.weight, block.attention.qkv.weight, block.mlp[0].weight):
        assert weight.std().item() == pytest.approx(std, rel=0.05)
    for weight in (block.attention.out.weight, block.mlp[-1].weight):
        assert weight.std().item() == pytest.approx(std / math.sqrt(16), rel=0.05)
    assert not block.attention.qkv.bias.any()
    assert not block.mlp[0].bias.any()


def test_options_change_what_they_name() -> None:
    network = Transformer(Shape(16, 2, 8), 1, 20, NoPE, bias=False, tied=True, hidden=24)
    assert network.head.weight is network.embedding.weight
    assert not any(name.endswith("bias") for name, _ in network.named_parameters())
    assert network.blocks[0].mlp[0].weight.shape == (24, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers: got 0"),
        ({"vocabulary": 0}, "vocabulary: got 0"),
        ({"dropout": 1.0}, "dropout: got 1.0"),
        ({"activation": "swish"}, "activation: got 'swish', expected one of gelu"),
    ],
)
def test_a_bad_number_is_named(change: dict, message: str) -> None:
    arguments = {"layers": 1, "vocabulary": 10, **change}
    with pytest.raises(ValueError, match=message):
        Transformer(Shape(8, 2, 4), arguments.pop("layers"), arguments.pop("vocabulary"), NoPE, **arguments)


@pytest.mark.parametrize(("dim", "heads"), [(10, 4), (0, 1), (8, 0)])
def test_a_bad_shape_is_named(dim: int, heads: int) -> None:
    with pytest.raises(ValueError, match=r"(heads|dim): got"):
        Shape(dim, heads, 4)


@pytest.mark.parametrize("name", names())
def test_one_token_at_a_time_with_a_cache_gives_the_same_logits(name: str, tiny_network) -> None:
    network = tiny_network(name)
    if not network.positions[0].prefix_consistent:
        pytest.skip("the strategy's angles depend on the length of the input")
    tokens = torch.randint(0, 50, (2, 24))

    with torch.no_grad():
        at_once = network(tokens)
        cache = network.new_cache()
        pieces = [network(tokens[:, :9], cache=cache)]
        pieces += [network(tokens[:, t : t + 1], cache=cache) for t in range(9, 24)]

    torch.testing.assert_close(torch.cat(pieces, 1), at_once, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", names())
def test_the_window_hides_what_lies_before_it(name: str, tiny_network) -> None:
    network = tiny_network(name)
    tokens = torch.randint(0, 50, (1, 30))
    changed = tokens.clone()
    changed[:, :10] = 7

    with torch.no_grad():
        before, after = network(tokens, window=4), network(changed, window=4)

    # two layers of window 4 let token t see back to t - 6
    torch.testing.assert_close(after[:, 16:], before[:, 16:], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(after[:, 15], before[:, 15], atol=1e-6)


def test_a_window_of_nothing_is_refused(tiny_network) -> None:
    with pytest.raises(ValueError, match="window: got 0"):
        tiny_network("NoPE")(torch.zeros(1, 4, dtype=torch.long), window=0)


def test_a_strategy_s_last_position_is_compared_without_asking_the_device(monkeypatch) -> None:
    """On a GPU, or compiled, nobody looks at the positions themselves: an index out of range would end the process."""
    monkeypatch.setattr(Learned, "_refuse", lambda self, positions: None)
    network, tokens = Transformer(Shape(8, 2, 10), 1, 20, Learned), torch.zeros(1, 6, dtype=torch.long)
    cache = network.new_cache()
    network(tokens, offset=4, cache=cache)
    for arguments in ({"offset": 5}, {"cache": cache}):
        with pytest.raises(ValueError, match=r"position: got 1\d, but Learned .* is 10; .*beyond: clamp"):
            network(tokens, **arguments)


def test_losses_are_the_cross_entropy_of_the_logits(tiny_network) -> None:
    network = tiny_network("KerpleLog")
    tokens = torch.randint(0, 50, (3, 13))
    expected = F.cross_entropy(network(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(
        3, 12
    )

    torch.testing.assert_close(network.losses(tokens), expected)
    torch.testing.assert_close(network.losses(tokens, last=5), expected[:, -5:])


@pytest.mark.parametrize("kept", [0, 10**6])
def test_losses_in_chunks_have_the_values_and_gradients_of_one_piece(kept: int) -> None:
    head = torch.nn.Linear(8, 11, bias=False).double()
    features = torch.randn(29, 8, dtype=torch.double, requires_grad=True)
    targets = torch.randint(0, 11, (29,))
    whole = F.cross_entropy(head(features), targets, reduction="none")
    expected = torch.autograd.grad(whole.sum(), (features, head.weight))

    # the chunked path computes in fp32, so fp64 inputs measure its rounding
    chunked = target_losses(head, features, targets, pieces=Pieces(4 * 11, kept))
    actual = torch.autograd.grad(chunked.sum(), (features, head.weight))

    torch.testing.assert_close(chunked.double(), whole, atol=1e-6, rtol=1e-6)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, atol=1e-6, rtol=1e-5)


def test_losses_are_fp32_under_autocast(tiny_network) -> None:
    network = tiny_network("RoPE")
    tokens = torch.randint(0, 50, (2, 20))
    with torch.autocast("cpu", torch.bfloat16):
        losses = network.losses(tokens)
        logits = network(tokens[:, :-1])
    assert losses.dtype == torch.float32
    expected = F.cross_entropy(logits.double().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(2, 19)
    torch.testing.assert_close(losses.double(), expected, atol=1e-5, rtol=1e-5)  # of the very same bf16 logits
