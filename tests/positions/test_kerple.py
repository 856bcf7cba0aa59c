"""KERPLE's eight against a loop in fp64, and what a user may ask of them."""

import math
from collections.abc import Callable
from pathlib import Path

import jsonargparse
import pytest
import torch

from kerple.attention.reference import attend_reference
from kerple.model import Transformer
from kerple.positions import Kerple, KerpleLog, KerplePower, Position, Shape, build
from kerple.positions.kernels import Kernel, Log, Power

HEADS, LENGTH = 3, 300
SHAPE = Shape(24, HEADS, 64)

# REFERENCE of every formula: the paper's, one distance of one head at a time
FORMULAS: dict[str, tuple[Callable | None, Callable | None]] = {
    "KerpleLog": (lambda d, r1, r2: -r1 * math.log(1 + r2 * d), None),
    "KerplePower": (lambda d, r1, r2: -r1 * d**r2, None),
    "KerpleLog3": (lambda d, r1, r2, r3: -r1 * math.log(1 + r2 * d**r3), None),
    "KerpleBiasWeight": (lambda d, r1, r2, r3, r4: -r1 * d**r2, lambda d, r1, r2, r3, r4: math.exp(-r3 * d**r4)),
    "KerpleBias2": (lambda d, r1, r2: r1 * math.exp(-r2 * d**2), None),
    "KerpleBias3": (lambda d, r1, r2, r3: r1 * math.exp(-r2 * d**r3), None),
    "KerpleWeight1": (None, lambda d, r1: math.exp(-r1 * d**2)),
    "KerpleWeight2": (None, lambda d, r1, r2: math.exp(-r1 * d**r2)),
}
STARTS = {"r1": [0.4, 1.7, 0.02], "r2": [0.03, 0.9, 0.5], "r3": [0.3, 1.9, 1.0], "r4": [0.5, 0.05, 1.2]}


def distances(length: int) -> torch.Tensor:
    return torch.arange(length, dtype=torch.float32)


def start(name: str) -> dict[str, list[float]]:
    formula = next(f for f in FORMULAS[name] if f is not None)
    return {r: STARTS[r] for r in formula.__code__.co_varnames[1 : formula.__code__.co_argcount]}


@pytest.mark.parametrize("name", FORMULAS)
def test_tables_are_the_papers_formula(name: str) -> None:
    given = start(name)
    position = build(name, dim=24, heads=HEADS, length=64, **given)

    for table, formula in zip(
        (position.bias(distances(LENGTH)), position.weight(distances(LENGTH))), FORMULAS[name], strict=True
    ):
        if formula is None:
            assert table is None
            continue
        expected = [[formula(d, *(r[h] for r in given.values())) for d in range(LENGTH)] for h in range(HEADS)]
        torch.testing.assert_close(table.double(), torch.tensor(expected).double(), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", FORMULAS)
def test_attention_with_it_is_a_double_loop(name: str) -> None:
    given = start(name)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, HEADS, 12, 8, dtype=torch.float64)
    position = build(name, dim=24, heads=HEADS, length=64, **given).double()
    got = attend_reference(q, k, v, table=position.bias(distances(12)), weight=position.weight(distances(12)))

    bias, weight = FORMULAS[name]
    for h in range(HEADS):
        r = [values[h] for values in given.values()]
        for m in range(12):
            scores = []
            for n in range(m + 1):
                plain = float(q[0, h, m] @ k[0, h, n]) / math.sqrt(8)
                scores.append(plain * (weight(m - n, *r) if weight else 1) + (bias(m - n, *r) if bias else 0))
            p = torch.tensor(scores, dtype=torch.float64).softmax(0)
            torch.testing.assert_close(got[0, h, m], p @ v[0, h, : m + 1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "upper"),
    [
        ("KerpleLog", {"r1": 2, "r2": 1}),
        ("KerplePower", {"r1": 1, "r2": 2}),
        ("KerpleLog3", {"r1": 2, "r2": 1, "r3": 2}),
        ("KerpleBiasWeight", {"r1": 1, "r2": 2, "r3": 1, "r4": 2}),
    ],
)
def test_draws_fill_the_papers_ranges(name: str, upper: dict[str, float]) -> None:
    torch.manual_seed(0)
    position = build(name, dim=4000, heads=4000, length=64)

    for r, top in upper.items():
        values = getattr(position, r).detach()
        assert 0.01 <= values.min() < 0.02 * top + 0.01
        assert 0.98 * top < values.max() <= top
        assert abs(values.mean() - top / 2) < 0.05 * top


@pytest.mark.parametrize(
    ("name", "bounded"),
    [
        ("KerpleLog", {}),
        ("KerplePower", {"r2": 2.0}),
        ("KerpleLog3", {"r3": 2.0}),
        ("KerpleBiasWeight", {"r2": 2.0, "r4": 2.0}),
        ("KerpleBias2", {}),
        ("KerpleBias3", {"r3": 2.0}),
        ("KerpleWeight1", {}),
        ("KerpleWeight2", {"r2": 2.0}),
    ],
)
def test_constraints_are_the_papers(name: str, bounded: dict[str, float]) -> None:
    position = build(name, dim=24, heads=HEADS, length=64)
    for value in (-3.0, 50.0):
        for parameter in position.parameters():
            parameter.data.fill_(value)
        position.constrain_()
        for r in start(name):
            expected = 0.01 if value < 0 else bounded.get(r, 50.0)
            assert getattr(position, r).detach().tolist() == pytest.approx([expected] * HEADS)


def test_a_table_stays_finite_at_the_ends_of_every_range() -> None:
    for name in FORMULAS:
        position = build(name, dim=24, heads=HEADS, length=64)
        for value in (-math.inf, math.inf):
            for parameter in position.parameters():
                parameter.data.fill_(value)
            position.constrain_()
            for table in (position.bias(distances(1_000_000)), position.weight(distances(1_000_000))):
                assert table is None or table.isfinite().all(), name


def test_distances_above_256_stay_apart() -> None:
    # in bf16 0..4095 has 769 values
    table = KerpleLog(SHAPE, r1=1.0, r2=1.0).bfloat16().bias(distances(4096))

    assert (table.diff(dim=-1) < 0).all()


def test_power_with_exponent_one_is_alibi() -> None:
    alibi = build("ALiBi", dim=24, heads=12, length=64)
    power = KerplePower(Shape(24, 12, 64), r1=[min(max(s, 0.01), 1) for s in alibi.slopes.tolist()], r2=1.0)
    steep = alibi.slopes >= 0.01

    torch.testing.assert_close(power.bias(distances(50))[steep], alibi.bias(distances(50))[steep])


def test_twelve_heads_have_24_numbers_for_all_layers_or_for_each() -> None:
    with torch.device("meta"):
        shared, layered = (
            Transformer(Shape(768, 12, 512), 3, 50, KerpleLog, per_layer=per_layer).positions
            for per_layer in (None, True)
        )

    assert sum(p.numel() for p in shared.parameters()) == 24
    assert sum(p.numel() for p in layered.parameters()) == 3 * 24


def test_neither_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="bias, weight: got none for both"):
        Kerple(SHAPE, bias=None)


def test_kernels_can_be_composed_in_python() -> None:
    position = Kerple(SHAPE, bias=lambda heads: Log(heads, 1.0, 0.5) + 0.5 * Power(heads, 0.2, 1.0), weight=None)
    d = torch.arange(20.0)

    torch.testing.assert_close(position.bias(distances(20)), (-torch.log(1 + 0.5 * d) - 0.1 * d).expand(HEADS, 20))


class Rational(Kernel):
    """A user's kernel, named in a YAML below."""

    def __init__(self, heads: int, rate: float = 0.1) -> None:
        super().__init__(heads)
        self.learn("rate", heads, rate, minimum=0.01)

    def forward(self, distance: torch.Tensor) -> torch.Tensor:
        return -self.rate[:, None] * distance / (1 + distance)


class Model:
    def __init__(self, position: Callable[[Shape], Position]) -> None:
        self.position = position(SHAPE)


def parse(*arguments: str) -> Position:
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(Model, "model")
    return parser.instantiate_classes(parser.parse_args(arguments)).model.position


def test_a_users_kernel_is_named_in_a_yaml(tmp_path: Path) -> None:
    config = tmp_path / "kernel.yaml"
    config.write_text(
        "model:\n  position:\n    class_path: Kerple\n    init_args:\n      bias:\n"
        f"        class_path: {__name__}.Rational\n        init_args: {{rate: 0.3}}\n      weight: Gaussian\n"
    )
    position = parse("--config", str(config))
    d = torch.arange(9.0)

    torch.testing.assert_close(position.bias(distances(9)), (-0.3 * d / (1 + d)).expand(HEADS, 9))
    assert position.weight(distances(9)) is not None


def test_sums_and_scalings_are_written_in_a_yaml(tmp_path: Path) -> None:
    config = tmp_path / "sum.yaml"
    config.write_text(
        "model:\n  position:\n    class_path: Kerple\n    init_args:\n      bias:\n        class_path: Sum\n"
        "        init_args:\n          kernels:\n"
        "            - {class_path: Log, init_args: {strength: [1, 2, 3], rate: 0.5}}\n"
        f"            - {{class_path: Scaled, init_args: {{factor: 2, kernel: {{class_path: {__name__}.Rational}}}}}}\n"
    )
    d = torch.arange(9.0)
    expected = -torch.tensor([[1.0], [2.0], [3.0]]) * torch.log(1 + 0.5 * d) - 0.2 * d / (1 + d)

    torch.testing.assert_close(parse("--config", str(config)).bias(distances(9)), expected)


def test_starting_values_come_from_the_command_line() -> None:
    position = parse(
        *("--model.position", "KerpleLog", "--model.position.r1", "0.5"),
        *("--model.position.r2", "[0.1, 0.2, 0.3]", "--model.position.floor", "0.05"),
    )
    assert isinstance(position, KerpleLog)
    assert position.r1.tolist() == pytest.approx([0.5, 0.5, 0.5])
    assert position.r2.tolist() == pytest.approx([0.1, 0.2, 0.3])
    position.r1.data.fill_(0.0)
    position.constrain_()
    assert position.r1.tolist() == pytest.approx([0.05] * 3)


def test_another_kernel_on_the_command_line_has_its_own_defaults() -> None:
    # jsonargparse carries values over when the class changes: the exponent of Power is learned, that of Log is not
    position = parse("--model.position", "Kerple", "--model.position.bias", "Power")

    assert sorted(name for name, _ in position.named_parameters()) == ["additive.exponent", "additive.strength"]
