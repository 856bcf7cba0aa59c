"""Attention probabilities made beside the model's attention, against the model itself and against closed forms."""

import math

import pytest
import torch
from torch import Tensor

from kerple import positions
from kerple.analyses.attention_maps import entropy, mean_distance, visit_probabilities
from kerple.positions import QueryKeyBlock, TokenPositions


def collect(network, tokens: Tensor, **options: int) -> list[Tensor]:
    maps: list[Tensor] = []
    visit_probabilities(network, tokens, lambda layer, p: maps.append(p), **options)
    return maps


@pytest.mark.parametrize(("name", "window"), [(name, (None, 5)[i % 2]) for i, name in enumerate(positions.names())])
def test_probabilities_reproduce_the_attentions_output(name: str, window: int | None, tiny_network) -> None:
    network, tokens = tiny_network(name), torch.randint(50, (2, 20))
    outputs: list[tuple[Tensor, Tensor]] = []

    def keep(module, inputs, output) -> None:
        *_, v = module.split(module.qkv(inputs[0]))
        outputs.append((v, output))

    hooks = [b.attention.register_forward_hook(keep) for b in network.blocks]
    with torch.no_grad():
        network.features(tokens, window=window)
        for hook in hooks:
            hook.remove()
        maps = collect(network, tokens, window=window)
        assert len(maps) == len(outputs) == 2
        for i, (p, (v, output), block) in enumerate(zip(maps, outputs, network.blocks, strict=True)):
            if name in ("Sink", "StickBreaking"):  # a part of each query's attention goes nowhere
                assert (p.sum(-1) <= 1 + 1e-6).all()
            else:
                torch.testing.assert_close(p.sum(-1), torch.ones(2, 4, 20))
            assert not p.triu(1).any()
            mixed = p @ v
            position = network.positions[min(i, len(network.positions) - 1)]
            if position.uses("add_to_output"):
                at, index = TokenPositions.line(20), torch.arange(20)
                distance = index[:, None] - index
                seen = (distance >= 0) & (distance < (window or 20))
                mixed = mixed + position.add_to_output(p, v, QueryKeyBlock(at, at, seen))
            expected = block.attention.out(mixed.transpose(1, 2).flatten(2))
            torch.testing.assert_close(expected, output, rtol=1e-4, atol=1e-5)


def test_a_compiled_network_is_looked_into_and_stays_compiled(tiny_network) -> None:
    network, tokens = tiny_network("ALiBi"), torch.randint(50, (1, 12))
    expected = collect(network, tokens)
    network.compile(backend="eager")
    network(tokens)  # its graph is made before there is a hook
    compiled = network.run_block
    actual = collect(network, tokens)
    assert network.run_block is compiled
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_even_attention_has_the_entropy_of_its_number_of_keys() -> None:
    even = torch.ones(6, 6).tril() / torch.arange(1, 7)[:, None]
    torch.testing.assert_close(entropy(even), torch.tensor([math.log(n) for n in range(1, 7)]))
    torch.testing.assert_close(mean_distance(even), torch.tensor([n / 2 for n in range(6)]))
