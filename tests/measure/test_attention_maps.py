"""Attention probabilities against the output of attention, and receptive fields against finite differences."""

import pytest
import torch
from torch import Tensor

from kerple import positions
from kerple.measure.receptive_field import distance_covering, gradient_by_distance, smallest_sufficient
from kerple.positions import QueryKeyBlock, TokenPositions
from kerple.positions.visibility import EVERYTHING, Visibility

CASES = [(name, (EVERYTHING, Visibility(5))[i % 2]) for i, name in enumerate(positions.names())]
CASES += [("RoPE", Visibility(5, 2, "capped")), ("KerpleLog", Visibility(5, 2, "cache"))]

DISTANCE = (torch.arange(20)[:, None] - torch.arange(20)).clamp(min=0)  # of 20 queries and 20 keys


def probabilities_of(network, tokens: Tensor, visibility: Visibility = EVERYTHING) -> list[Tensor]:
    """Return the attention probabilities of each layer."""
    maps: list[Tensor] = []
    network.visit_attention(tokens, lambda layer, p: maps.append(p), visibility)
    return maps


@pytest.mark.parametrize(("name", "visibility"), CASES)
def test_probabilities_reproduce_the_output_of_attention(name: str, visibility: Visibility, tiny_network) -> None:
    network, tokens = tiny_network(name), torch.randint(50, (2, 20))
    calls: list[tuple[Tensor, Tensor]] = []  # input and output of attention in each layer
    hooks = [
        block.attention.register_forward_hook(lambda module, inputs, output: calls.append((inputs[0], output)))
        for block in network.blocks
    ]
    with torch.no_grad():
        network.features(tokens, visibility)
        for hook in hooks:
            hook.remove()
        maps = probabilities_of(network, tokens, visibility)
        assert len(maps) == len(calls) == 2
        for i, (p, (x, output), block) in enumerate(zip(maps, calls, network.blocks, strict=True)):
            *_, v = block.attention.split(block.attention.qkv(x))
            if name in ("Sink", "StickBreaking"):  # the probabilities of a query add up to less than 1
                assert (p.sum(-1) <= 1 + 1e-6).all()
            else:
                torch.testing.assert_close(p.sum(-1), torch.ones(2, 4, 20))
            assert not p.triu(1).any()
            mixed, position = p @ v, network.positions[min(i, len(network.positions) - 1)]
            if (vectors := position.value_bias()) is not None:
                mixed = mixed + torch.einsum("bhmn,mnd->bhmd", p, vectors[DISTANCE.clamp(max=len(vectors) - 1)])
            if position.uses("add_to_output"):
                visible = torch.ones(20, 20, dtype=torch.bool).tril().triu(1 - (visibility.window or 20))
                token_positions = TokenPositions.arange(20)
                mixed = mixed + position.add_to_output(p, v, QueryKeyBlock(token_positions, token_positions, visible))
            mixed = position.transform_output(mixed, x)
            expected = block.attention.out(mixed.transpose(1, 2).flatten(2))
            torch.testing.assert_close(expected, output, rtol=1e-4, atol=1e-5)


def test_probabilities_of_a_compiled_network_are_equal_and_it_stays_compiled(tiny_network) -> None:
    network, tokens = tiny_network("ALiBi"), torch.randint(50, (1, 12))
    expected = probabilities_of(network, tokens)
    network.compile(backend="eager")
    network(tokens)  # compiles before there is a hook
    compiled = network.run_block
    torch.testing.assert_close(probabilities_of(network, tokens), expected)
    assert network.run_block is compiled


# Receptive fields: gradients by distance against finite differences, and sufficient windows


def test_fractions_equal_finite_differences_of_the_last_loss(tiny_network) -> None:
    network, tokens = tiny_network("KerpleLog").double().requires_grad_(False), torch.randint(50, (2, 9))
    fractions = gradient_by_distance(network, tokens)
    assert fractions.shape == (2, 8)
    torch.testing.assert_close(fractions.sum(1), torch.ones(2, dtype=torch.float64))
    # one row of embeddings per input, so that a single input can be changed
    rows = network.embedding.weight[tokens[1, :-1]].clone()  # (8, D)
    network.embedding = torch.nn.Embedding.from_pretrained(rows.clone(), freeze=True)

    def loss(t: int, i: int, step: float) -> float:
        """Return the last loss with ``step`` added to entry i of the embedding of input t."""
        network.embedding.weight[t, i] = rows[t, i] + step
        logits = network(torch.arange(8)[None])[0, -1].double()
        network.embedding.weight[t, i] = rows[t, i]
        return float(logits.logsumexp(0) - logits[tokens[1, -1]])

    slopes = [[loss(t, i, 1e-5) - loss(t, i, -1e-5) for i in range(rows.shape[1])] for t in range(8)]
    expected = torch.tensor(slopes, dtype=torch.float64).norm(dim=1).flip(0)  # entry d at distance d
    torch.testing.assert_close(fractions[1], expected / expected.sum(), rtol=1e-4, atol=1e-6)


def test_distance_covering_is_the_smallest_distance() -> None:
    cumulative = torch.tensor([0.5, 0.75, 0.875, 1.0], dtype=torch.float64)
    assert [distance_covering(cumulative, fraction) for fraction in (0.5, 0.51, 0.75, 0.9, 1.0)] == [0, 1, 1, 3, 3]


@pytest.mark.parametrize(
    ("perplexities", "window"),
    [
        ({1: 30.0, 2: 10.05, 4: 10.5, 8: 10.0}, 8),  # 2 is sufficient, but 4 is not
        ({1: 10.0, 2: 10.0, 4: 9.0, 8: 10.0}, 1),  # less than the perplexity of full attention is sufficient
        ({1: 30.0, 2: 10.101, 4: 10.1, 8: 10.0}, 4),  # 10.1 exceeds 10 by 1%
    ],
)
def test_the_smallest_sufficient_window_exceeds_full_perplexity_by_one_per_cent(perplexities, window) -> None:
    assert smallest_sufficient(perplexities) == window
