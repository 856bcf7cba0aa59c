"""What holds for every strategy, by the suite that is public; a new one is covered by being there."""

import inspect
import re
from functools import partial

import pytest
import torch
from torch import Tensor

from kerple import positions as package
from kerple.positions import (
    FIRE,
    FoX,
    KerpleLog,
    KerpleWeight1,
    Layers,
    Position,
    RandomizedPositions,
    RoPE,
    Shape,
    Sinusoidal,
    build,
    names,
    strategies,
)
from kerple.positions.base import HOOKS
from kerple.positions.products import product
from kerple.positions.wrapper import Wrapper
from kerple.testing import AT_LENGTHS, PROPERTIES, DoesNotApply, Subject
from kerple.testing.reading import a_compiled_network_computes_the_same

SETTINGS = {
    "Learned, clamp": {"beyond": "clamp"},
    "RandomizedPositions, FoX": {"position": FoX},
    "Layers, window": {"near": KerpleLog, "window": 6},
    "Together, four": {"parts": (Sinusoidal, FoX, RoPE, KerpleWeight1)},
    "Abacus, FIRE": {"position": FIRE},
}
# others have the hooks of one of these
COMPILED = {
    "Abacus, FIRE", "CoPE", "DAPE", "FoX", "KerpleBiasWeight", "KerpleLog", "Layers", "Learned", "PaTH", "PoPE",
    "RandomizedPositions", "RoPE", "Shaw", "StickBreaking", "TransformerXL",
}  # fmt: skip
# they differ from KerpleLog and KerpleBiasWeight in a formula, which test_kerple.py has
FORMULAS = {"KerpleBias2", "KerpleBias3", "KerpleLog3", "KerplePower", "KerpleWeight1", "KerpleWeight2"}
over_names = pytest.mark.parametrize("name", names())


def subject(name: str) -> Subject:
    return Subject(partial(strategies()[name.split(",")[0]], **SETTINGS.get(name, {})))


@pytest.mark.parametrize("name", [*names(), *SETTINGS])
def test_every_property_holds(name: str) -> None:
    checked = subject(name)
    for title, holds in PROPERTIES.items():
        if title == "a compiled network computes the same" and name not in COMPILED:
            continue
        if name in FORMULAS and holds in AT_LENGTHS:
            continue
        try:
            holds(checked)
        except DoesNotApply as reason:
            if not _expected(name, str(reason)):
                raise


def _expected(name: str, reason: str) -> bool:
    """Few properties may not apply, and for few strategies."""
    if reason == "it is not prefix_consistent":
        return name.startswith("RandomizedPositions")
    return reason == "it has a table of positions" and name.startswith("Learned")


def test_a_wrapper_forwards_every_hook_that_it_does_not_override() -> None:
    public = {n for n, f in vars(Position).items() if inspect.isfunction(f) and not n.startswith("_")}
    assert public - {"uses", "require"} == set(HOOKS)
    for wrapper in (Layers, RandomizedPositions):
        position = wrapper(Shape(32, 4, 16))
        for hook in HOOKS:
            if getattr(wrapper, hook) is getattr(Wrapper, hook):
                count = len(inspect.signature(getattr(Position, hook)).parameters) - 1
                setattr(position.position, hook, lambda *args, hook=hook: (hook, len(args)))
                assert getattr(position, hook)(*[None] * count) == (hook, count)


@pytest.mark.slow  # compiles C++
@over_names
def test_a_network_compiled_by_inductor_computes_the_same(name: str) -> None:
    a_compiled_network_computes_the_same(subject(name), "inductor")


@pytest.mark.parametrize(
    ("name", "setting"),
    [("RoPE", {"scaling": "dynamic_ntk", "factor": 2.0}), ("Learned", {"beyond": "interpolate"})],
)
def test_what_depends_on_the_length_of_the_input_says_so(name: str, setting: dict) -> None:
    network = Subject(partial(strategies()[name], **setting)).network(trained=16)
    tokens = torch.randint(0, 50, (2, 30))

    moved = (network(tokens[:, :20]) - network(tokens)[:, :20]).abs().max().item()

    assert moved > 1e-3
    assert not network.positions[0].prefix_consistent


@over_names
def test_the_name_is_a_class_of_the_package_with_a_source(name: str) -> None:
    strategy = getattr(package, name)

    assert issubclass(strategy, Position)
    assert strategy.__name__ == name
    source = inspect.getdoc(strategy) + (inspect.getdoc(inspect.getmodule(strategy)) or "")
    known = re.search(r"arXiv\s\d{4}\.\d{5}|GPT-2|Source: ours\.", source) or name == "Together"
    assert known, f"{name}: of which paper? Write arXiv and its number into the docstring, or 'Source: ours.'"


def test_the_product_of_a_strategy_is_full_under_any_setting() -> None:
    a, b = torch.randn(2, 3, 5, 7, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    seen, real = [], torch.matmul

    def matmul(x: Tensor, y: Tensor) -> Tensor:
        seen.append((torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")))
        return real(x, y)

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with torch.autocast("cpu", torch.bfloat16), pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "matmul", matmul)
            out = product(a, b)
            grads = torch.autograd.grad(out.square().sum(), (a, b))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == [("highest", False)] * 3
    exact = [x.detach().double().requires_grad_() for x in (a, b)]
    wanted = torch.autograd.grad((exact[0] @ exact[1]).square().sum(), exact)
    for got, expected in zip((out, *grads), (exact[0] @ exact[1], *wanted), strict=True):
        torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=1e-5)
    assert torch.autograd.gradcheck(product, exact)
    torch.library.opcheck(torch.ops.kerple.product.default, exact)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"position: got 'Alibi', expected one of ALiBi, .*XPos"):
        build("Alibi", dim=32, heads=4, length=16)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((32, 5, 16), "heads: got 5, which does not divide dim 32"),
        ((32, 4, 0), "length: got 0"),
        ((0, 4, 16), "dim: got 0"),
        ((32, 4, 16, 2, 2), "layer: got 2, expected 0 to 1"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Shape(*shape)
