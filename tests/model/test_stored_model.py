"""Weights of a stored model are copied into the strategies of the same classes."""

from typing import Any

import pytest
import torch

from kerple.model.stored_model import StoredModel, build_transformer, copy_weights
from kerple.positions import KerpleLog

MODEL: dict[str, Any] = {"layers": 2, "dim": 16, "heads": 2, "length": 8, "vocabulary": 9, "per_layer": True}


class Mine(KerpleLog):
    """A user's strategy."""


def strategy(name: str, **options: Any) -> dict[str, Any]:
    return {"class_path": name if "." in name else f"kerple.positions.{name}", "init_args": options}


def randomized(inner: str) -> dict[str, Any]:
    return strategy("RandomizedPositions", position=strategy(inner))


def combined(*parts: str) -> dict[str, Any]:
    return strategy("Combined", parts=[strategy(part) for part in parts])


def pattern(*kinds: str) -> dict[str, Any]:
    return strategy("LayerPattern", kinds={f"{i}": strategy(kind) for i, kind in enumerate(kinds)})


def in_layers(*names: str, layers: tuple[int, ...] = (0, 1)) -> set[str]:
    return {f"{layer}.{name}" for layer in layers for name in names}


MINE = f"{__name__}.Mine"
PAIRS = [
    (randomized("KerpleLog"), randomized("KerpleLog"), in_layers("position.r1", "position.r2")),
    (randomized("KerpleLog"), randomized("KerplePower"), set()),
    (randomized("KerpleLog"), strategy("Abacus", position=strategy("KerpleLog")), set()),
    (strategy("Abacus"), strategy("Abacus"), {"0.table"}),
    ("Combined", combined("SSMax", "KerpleLog"), in_layers("parts.0.scale", "parts.1.r1", "parts.1.r2")),
    ("kerple.positions.Combined", combined("SSMax", "KerplePower"), in_layers("parts.0.scale")),
    (combined("KerpleLog", "SSMax"), combined("SSMax", "KerpleLog"), set()),
    (combined(MINE, "NoPE"), combined(MINE, "KerpleLog"), in_layers("parts.0.r1", "parts.0.r2")),
    (combined("KerpleLog", "KerpleLog"), combined(MINE, "KerpleLog"), in_layers("parts.1.r1", "parts.1.r2")),
    (
        pattern("KerpleLog", "KerplePower"),
        pattern("KerplePower", "KerplePower"),
        in_layers("position.r1", "position.r2", layers=(1,)),
    ),
]


@pytest.mark.parametrize(("before", "after", "expected"), PAIRS)
def test_parameters_are_copied_if_all_strategies_around_them_are_of_the_same_class(before, after, expected) -> None:
    stored, network = (
        build_transformer(MODEL | {"position": position, "length": length}, remote=[Mine])
        for position, length in ((before, 8), (after, 16))  # draws of RandomizedPositions have the training length
    )
    stored.positions.requires_grad_(False).apply(lambda module: [p.add_(0.1) for p in module.parameters(recurse=False)])
    stored.constrain_()  # takes a step, and draws again
    initial = {name: value.clone() for name, value in network.positions.state_dict().items()}
    account = copy_weights(network, StoredModel(MODEL | {"position": before}, dict(stored.state_dict())))
    copied = {name.removeprefix("positions.") for name in account.copied if name.startswith("positions.")}
    parameters = dict(network.positions.named_parameters())
    assert copied == expected
    assert account.new.keys() == {f"positions.{name}" for name in parameters.keys() - expected}
    for name, value in network.positions.state_dict().items():
        assert torch.equal(value, stored.positions.state_dict()[name] if name in expected else initial[name]), name
