"""Attention probabilities reproduce the attention of the model; receptive fields against finite differences."""

import pytest
import torch
from torch import Tensor

from kerple import positions
from kerple.measure.receptive_field import distance_covering, gradient_by_distance, smallest_sufficient
from kerple.positions import QueryKeyBlock, TokenPositions
from kerple.positions.visibility import Visibility


def collect(network, tokens: Tensor, window: int | None = None) -> list[Tensor]:
    maps: list[Tensor] = []
    network.visit_attention(tokens, lambda layer, p: maps.append(p), Visibility(window))
    return maps


@pytest.mark.parametrize(("name", "window"), [(name, (None, 5)[i % 2]) for i, name in enumerate(positions.names())])
def test_probabilities_reproduce_the_attentions_output(name: str, window: int | None, tiny_network) -> None:
    network, tokens = tiny_network(name), torch.randint(50, (2, 20))
    outputs: list[tuple[Tensor, Tensor]] = []
    inputs_of: list[Tensor] = []

    def keep(module, inputs, output) -> None:
        *_, v = module.split(module.qkv(inputs[0]))
        outputs.append((v, output))
        inputs_of.append(inputs[0])

    hooks = [b.attention.register_forward_hook(keep) for b in network.blocks]
    with torch.no_grad():
        network.features(tokens, Visibility(window))
        for hook in hooks:
            hook.remove()
        maps = collect(network, tokens, window)
        assert len(maps) == len(outputs) == 2
        for i, (p, (v, output), block) in enumerate(zip(maps, outputs, network.blocks, strict=True)):
            if name in ("Sink", "StickBreaking"):  # the probabilities of a query add up to less than 1
                assert (p.sum(-1) <= 1 + 1e-6).all()
            else:
                torch.testing.assert_close(p.sum(-1), torch.ones(2, 4, 20))
            assert not p.triu(1).any()
            mixed = p @ v
            position = network.positions[min(i, len(network.positions) - 1)]
            if position.uses("add_to_output"):
                at, index = TokenPositions.arange(20), torch.arange(20)
                distance = index[:, None] - index
                seen = (distance >= 0) & (distance < (window or 20))
                mixed = mixed + position.add_to_output(p, v, QueryKeyBlock(at, at, seen))
            mixed = position.transform_output(mixed, inputs_of[i])
            expected = block.attention.out(mixed.transpose(1, 2).flatten(2))
            torch.testing.assert_close(expected, output, rtol=1e-4, atol=1e-5)


def test_a_compiled_network_is_looked_into_and_stays_compiled(tiny_network) -> None:
    network, tokens = tiny_network("ALiBi"), torch.randint(50, (1, 12))
    expected = collect(network, tokens)
    network.compile(backend="eager")
    network(tokens)  # compiles before there is a hook
    compiled = network.run_block
    torch.testing.assert_close(collect(network, tokens), expected)
    assert network.run_block is compiled


# Receptive fields: gradients by distance against finite differences, and sufficient windows


def test_shares_are_gradients_of_the_last_loss_by_finite_differences(tiny_network) -> None:
    network = tiny_network("KerpleLog").double().requires_grad_(False)
    tokens = torch.randint(50, (2, 9))
    shares = gradient_by_distance(network, tokens)
    assert shares.shape == (2, 8)
    torch.testing.assert_close(shares.sum(1), torch.ones(2, dtype=torch.float64))
    # one embedding row per position, so that a single input can be changed
    own = torch.arange(8)
    rows = network.embedding.weight[tokens[1, :-1]].clone()  # (8, D)
    network.embedding = torch.nn.Embedding.from_pretrained(rows.clone(), freeze=True)
    target = tokens[1, -1]

    def loss() -> float:
        logits = network(own[None])[0, -1].double()
        return float(logits.logsumexp(0) - logits[target])

    norms, step = [], 1e-5
    for t in range(8):
        slope = []
        for i in range(rows.shape[1]):
            network.embedding.weight[t, i] = rows[t, i] + step
            above = loss()
            network.embedding.weight[t, i] = rows[t, i] - step
            slope.append((above - loss()) / (2 * step))
            network.embedding.weight[t, i] = rows[t, i]
        norms.append(torch.tensor(slope, dtype=torch.float64).norm())
    expected = torch.stack(norms).flip(0)  # entry d at distance d
    torch.testing.assert_close(shares[1], expected / expected.sum(), rtol=1e-4, atol=1e-6)


def test_a_model_with_one_layer_and_a_sharp_bias_sees_its_neighbours_alone(tiny_network) -> None:
    network = tiny_network("ALiBi")
    network.positions[0].slopes.fill_(50.0)
    shares = gradient_by_distance(network, torch.randint(50, (4, 33))).mean(0)
    assert distance_covering(shares.cumsum(0), 0.99) == 0
    cumulative = torch.tensor([0.5, 0.75, 0.875, 1.0], dtype=torch.float64)
    assert [distance_covering(cumulative, part) for part in (0.5, 0.51, 0.75, 0.9, 1.0)] == [0, 1, 1, 3, 3]


def test_smallest_window_within_one_per_cent() -> None:
    assert smallest_sufficient({1: 30.0, 2: 10.05, 4: 10.5, 8: 10.0}) == 8  # 2 is good by chance
    assert smallest_sufficient({1: 10.0, 2: 10.0, 4: 9.0, 8: 10.0}) == 1  # better than full is enough
    assert smallest_sufficient({1: 30.0, 2: 10.101, 4: 10.1, 8: 10.0}) == 4  # 10.1 is still within 1% of 10
