"""Properties of every strategy, which the suite of `python run.py check` tests, and errors in options."""

import inspect
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kerple import positions
from kerple.base.errors import UserError
from kerple.model import Transformer
from kerple.positions import Combined, KerpleLog, LayerPattern, PaTH, PoPE, Position, Shape, names, strategies
from kerple.positions.base import HOOKS
from kerple.positions.combined import SINGLE_WIDTH
from kerple.positions.fox import cumulative_sums
from kerple.positions.fp32_matmul import product
from kerple.positions.wrapper import Wrapper
from kerple.testing import AT_LENGTHS, PROPERTIES, DoesNotApply, Subject
from kerple.testing.forward_pass import torch_compile

# options of a strategy; after a comma, a second name for further options of the strategy
SETTINGS = {
    "DAPE": {"hidden": 3},
    "DAPEv2": {"hidden": 3},
    "PaTH": {"rank": 3},
    "Learned, clamp": {"beyond": "clamp"},
    "RandomizedPositions, FoX": {"position": positions.FoX},
    "RoPE, proportional": {"scaling": "proportional", "rotary_fraction": 0.5},
    "Temperature, beam": {"rule": "beam", "length": 6},
    "SSMax, bias": {"start": 0.0, "bias": 1.0},
    "LearnedRelativeBias, short": {"rank": 3, "extent": 20, "temperature_length": 12},
    "LayerPattern, windows": {"kinds": {"a": KerpleLog, "b": positions.RoPE}, "windows": {"a": 6, "b": 9}},
    "Combined, four": {"parts": (positions.Sinusoidal, positions.FoX, positions.RoPE, positions.KerpleWeight1)},
    "Abacus, FIRE": {"position": positions.FIRE},
    "Abacus, 101": {"rows": 101},
    "Coupled, frozen": {"learned": False},
    "SelfExtend, XPos": {"position": positions.XPos},
}
# strategies that the fast tests compile, at least one for each hook; the slow test below compiles all strategies
COMPILED = {
    "Abacus, FIRE", "FoX", "KerpleBiasWeight", "KerpleLog", "LearnedRelativeBias, short", "PoPE", "RandomizedPositions",
    "RoPE", "Shaw", "StickBreaking",
}  # fmt: skip
# strategies that differ from KerpleLog and KerpleBiasWeight only in the formula, which test_kerple.py tests
FORMULAS = {"KerpleBias2", "KerpleBias3", "KerpleLog3", "KerplePower", "KerpleWeight1", "KerpleWeight2"}
# reasons for which a property may not apply, and the strategies that may give them
EXPECTED = {
    "it is not prefix_consistent": {"RandomizedPositions"},
    "it has a table of positions": {"Learned", "LearnedRelativeBias", "RandomizedPositions"},
    "shift_invariant is None": {"SelfExtend"},  # True for offsets that are multiples of its group size
}
LONGROPE = {"scaling": "longrope", "factor": 2.0, "short_factors": [1.0] * 4, "long_factors": [2.0] * 4}
RANDOMIZED_PATH = partial(positions.RandomizedPositions, position=PaTH)
COUPLED_LEARNED = partial(positions.Coupled, position=positions.Learned)
DRAWN = partial(positions.RandomizedPositions, max_positions=24)
WITH_NARROW_TABLE = [
    (DRAWN, positions.Learned),
    (COUPLED_LEARNED, partial(LayerPattern, kinds={"a": DRAWN})),
    (partial(DRAWN, position=positions.Learned, max_positions=12), DRAWN),
]
NARROW_TABLE = (
    r"parts: got Learned with positions up to 11, and RandomizedPositions, which draws up to 23; .*\(Combined\)"
)
BY_LENGTH = [partial(positions.RoPE, **options) for options in (LONGROPE, {"scaling": "dynamic_ntk", "factor": 2.0})]
FACTORS = {
    "SSMax": positions.SSMax,
    "Temperature": positions.Temperature,
    "LearnedRelativeBias": partial(positions.LearnedRelativeBias, temperature_length=12),
    "LayerPattern": partial(LayerPattern, kinds={"a": positions.SSMax}),
}
TWO_NEIGHBOR_WINDOWS = [partial(positions.SelfExtend, position=positions.SSMax)] * 2


def subject(name: str) -> Subject:
    return Subject(partial(strategies()[name.split(",")[0]], **SETTINGS.get(name, {})))


# fast tests include every strategy, but further options of a strategy only if they are in COMPILED, and several lengths
# only for four strategies, because test_loops.py tests all strategies but CoPE at a length of its own
AT_ALL_LENGTHS = {"CoPE", "FoX", "KerpleLog", "RoPE"}
SLOW = {name for name in SETTINGS if "," in name} - COMPILED
ALL = sorted({*names(), *SETTINGS})


@pytest.mark.parametrize(
    ("name", "fast"),
    [
        *((name, True) for name in ALL if name not in SLOW | AT_ALL_LENGTHS),
        *(pytest.param(name, False, marks=[] if name in AT_ALL_LENGTHS else pytest.mark.slow) for name in ALL),
    ],
)
def test_every_property_holds(name: str, fast: bool) -> None:
    checked = replace(subject(name), fast=fast)
    for test in PROPERTIES.values():
        if test is torch_compile and name not in COMPILED:
            continue
        if name in FORMULAS and test in AT_LENGTHS:
            continue
        try:
            test(checked)
        except DoesNotApply as reason:
            if name.split(",")[0] not in EXPECTED.get(str(reason), ()):
                raise


def test_a_wrapper_forwards_every_hook_that_it_does_not_override() -> None:
    for wrapper in (LayerPattern, positions.RandomizedPositions):
        position = wrapper(Shape(32, 4, 16))
        for hook in HOOKS:
            if getattr(wrapper, hook) is getattr(Wrapper, hook):
                count = len(inspect.signature(getattr(Position, hook)).parameters) - 1
                setattr(position.position, hook, lambda *args, hook=hook: (hook, len(args)))
                assert getattr(position, hook)(*[None] * count) == (hook, count)
    with pytest.raises(UserError, match=r"^LayerPattern: mode: got x, "):  # of the wrapper, not of the strategy in it
        LayerPattern(Shape(32, 4, 16)).require_name("mode", "x", Literal["y"])


@pytest.mark.slow  # compiles C++
@pytest.mark.parametrize("name", names())
def test_a_network_compiled_by_inductor_computes_the_same(name: str) -> None:
    torch_compile(subject(name), "inductor")


@pytest.mark.parametrize(
    ("name", "setting"),
    [("RoPE", {"scaling": "dynamic_ntk", "factor": 2.0}), ("RoPE", LONGROPE), ("Learned", {"beyond": "interpolate"})],
)
def test_strategies_that_depend_on_the_input_length_are_not_prefix_consistent(name: str, setting: dict) -> None:
    network = Subject(partial(strategies()[name], **setting)).network(trained=16)
    tokens = torch.randint(0, 50, (2, 30))
    assert (network(tokens[:, :12]) - network(tokens)[:, :12]).abs().max().item() > 1e-3
    assert not network.positions[0].prefix_consistent


def test_products_ignore_autocast_and_tf32() -> None:
    a, b = torch.randn(2, 3, 5, 7, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    settings, matmul, before = [], torch.matmul, torch.get_float32_matmul_precision()

    def record(x: Tensor, y: Tensor) -> Tensor:
        settings.append((torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")))
        return matmul(x, y)

    try:
        torch.set_float32_matmul_precision("high")
        with torch.autocast("cpu", torch.bfloat16), pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "matmul", record)
            out = product(a, b)
            out.square().sum().backward()
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert settings == [("highest", False)] * 3
    torch.testing.assert_close(out, a @ b)
    exact = [x.detach().double().requires_grad_() for x in (a, b)]
    assert torch.autograd.gradcheck(product, exact)
    torch.library.opcheck(torch.ops.kerple.product.default, exact)


SHAPE = Shape(24, 3, 12, layers=4)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("CoPE", {"rows": 1}, "rows: got 1, expected 2 or more"),
        # DAPE uses only biases, so that it would see keys outside the window
        ("DAPE", {"over": partial(LayerPattern, kinds={"a": positions.ALiBi})}, "over: got LayerPattern"),
        ("KernelSum", {"kernels": [KerpleLog, positions.FIRE]}, "kernels: got .*, expected one or more biases by dist"),
        ("KernelSum", {"factors": [1.0, -1.0]}, "factors: got .*, expected 2 numbers of 0 or more"),
        ("KernelSum", {"kernels": [KerpleLog, positions.T5]}, "kernels: got .*, expected conditionally positive def"),
        ("LayerPattern", {"kinds": {"a": positions.Sinusoidal}}, "kinds: a: got Sinusoidal, expected a strategy that"),
        ("LayerPattern", {"kinds": {}}, "kinds: got none"),
        ("LayerPattern", {"pattern": ["local"] * 5}, "pattern: got 5 kinds, expected 1 to 4, the number of layers"),
        ("LayerPattern", {"windows": {"far": 3}}, "windows: got far, expected one of local, global"),
        ("LayerPattern", {"windows": {"local": 0}}, "windows: local: got 0, expected at least 1 key"),
        ("RandomizedPositions", {"max_positions": 11}, "max_positions: got 11"),
        ("RandomizedPositions", {"max_positions": 0}, "max_positions: got 0"),
        ("RandomizedPositions", {"position": positions.Learned, "max_positions": -5}, "max_positions: got -5"),
        ("RoPE", {"scaling": "pi"}, "factor: got None, expected a number of 1 or more with"),
        ("RoPE", {"rotary_fraction": 0.1}, "rotary_fraction: got 0.1, which is 1 of a head's 8 dimensions"),
        ("RoPE", LONGROPE | {"short_factors": [1.0]}, r"short_factors: got \[1.0\], expected 4 positive numbers"),
        ("RoPE", {"long_factors": [2.0] * 4}, "long_factors: got .*, with scaling longrope; none with"),
        ("LearnedRelativeBias", {"rank": 9}, "rank: got 9, expected 1 to 8"),
        ("RoPE", {"factor": 8.0}, "factor: got 8.0, expected null, or a scaling, such as pi or yarn"),
        ("LearnedRelativeBias", {"extent": 0}, "extent: got 0, expected a dist"),
        ("Temperature", {"length": 1}, "length: got 1, expected 2 keys or more"),
        ("Temperature", {"rule": "swan", "scale": 0.2}, "scale: got 0.2, expected no value, because swan has no"),
        ("SelfExtend", {"group": 0}, "group: got 0, expected at least 1 position"),
        ("ReRoPE", {"neighbor_window": 0}, "neighbor_window: got 0, expected at least 1 key"),
        ("ReRoPE", {"position": KerpleLog}, "position: got KerpleLog, expected a strategy that only t"),
        ("SelfExtend", {"position": positions.ReRoPE}, "position: got ReRoPE, expected a strategy that only t"),
        *(("SelfExtend", {"position": rope}, "position: got RoPE, which depends on the length") for rope in BY_LENGTH),
        ("Combined", {"parts": (RANDOMIZED_PATH, KerpleLog)}, "parts: got KerpleLog with PaTH"),
        ("Combined", {"parts": TWO_NEIGHBOR_WINDOWS}, "parts: got SelfExtend with SelfExtend"),
        ("Combined", {"parts": (positions.FoX, PaTH)}, "parts: got FoX before PaTH"),
        *(("Combined", {"parts": (x, PoPE)}, f"parts: got {name} before PoPE, .*first") for name, x in FACTORS.items()),
        ("Combined", {"parts": (positions.ReRoPE, positions.RoPE)}, "parts: got RoPE with ReRoPE, which doubles"),
        *(("Combined", {"parts": parts}, NARROW_TABLE) for parts in WITH_NARROW_TABLE),
        *(("Combined", {"parts": (PoPE, other)}, f"parts: got {other.__name__} with PoPE") for other in SINGLE_WIDTH),
    ],
)
def test_an_invalid_option_is_an_error(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^{name}: {message}"):
        strategies()[name](SHAPE, **options)


@pytest.mark.parametrize("name", strategies())
def test_an_unknown_value_of_an_option_with_names_is_an_error(name: str) -> None:
    for option, kind in get_type_hints(strategies()[name].__init__).items():
        if any(get_origin(part) is Literal for part in (kind, *get_args(kind))):
            with pytest.raises(UserError, match=f"^{name}: {option}: got nosuch, expected one of "):
                strategies()[name](SHAPE, **{option: "nosuch"})


def test_a_table_of_positions_may_be_combined_inside_randomized_positions() -> None:
    inside = partial(Combined, parts=(positions.Learned, KerpleLog))
    for build in (
        partial(DRAWN, position=inside),
        partial(Combined, parts=(DRAWN, partial(positions.Learned, beyond="clamp"))),
        partial(Combined, parts=(DRAWN, partial(DRAWN, position=positions.Learned))),
    ):
        network, tokens = Transformer(SHAPE, 4, 9, build, per_layer=False), torch.zeros(1, 24, dtype=torch.int64)
        for _ in range(5):
            assert network(tokens[:, :12]).isfinite().all()
            network.constrain_()
        assert network.eval()(tokens).isfinite().all()
    # `embed` of later layers is not called
    drawn_later = partial(LayerPattern, kinds={"a": positions.NoPE, "b": DRAWN})
    network = Transformer(SHAPE, 4, 9, partial(Combined, parts=(positions.Learned, drawn_later)))
    assert network(tokens[:, :12]).isfinite().all()


def test_invalid_sizes_and_an_unknown_name_are_errors() -> None:
    with pytest.raises(UserError, match="heads: got 5, expected a divisor of dim, which is 32"):
        Shape(32, 5, 16)
    with pytest.raises(UserError, match="scaling: got proportional, expected another one, because a head has 9"):
        positions.RoPE(Shape(18, 2, 16), scaling="proportional", rotary_fraction=0.5)
    with pytest.raises(UserError, match="name: got Alibi, did you mean ALiBi"):
        positions.build("Alibi", dim=32, heads=4, length=16)


def test_strategies_that_are_allowed_with_pope_support_twice_the_width() -> None:
    with_rope = ("LayerPattern", "RandomizedPositions", "ReRoPE")
    for name, strategy in strategies().items():
        if strategy not in SINGLE_WIDTH and name not in with_rope:
            network = Transformer(Shape(32, 4, 24), 1, 50, partial(Combined, parts=(PoPE, strategy)), per_layer=True)
            assert network(torch.randint(50, (1, 9))).isfinite().all(), name


def test_a_pattern_repeats_over_the_layers_and_may_end_inside_a_repetition() -> None:
    """Test the windows of Gemma 3 1B. `tests/hf/test_families.py` tests the frequencies of its kinds."""
    build = partial(LayerPattern, pattern=["local"] * 5 + ["global"], windows={"local": 512})
    layers = Transformer(Shape(8, 2, 8), 26, 9, build).positions
    assert [i for i, layer in enumerate(layers) if layer.window is None] == [5, 11, 17, 23]
    assert {layer.window for layer in layers} == {None, 512}


def test_one_strategy_for_all_layers_is_an_error_if_layers_differ() -> None:
    with pytest.raises(UserError, match=r"per_layer: got false, expected true for \w+, whose layers differ"):
        Transformer(Shape(16, 2, 8), 4, 20, partial(Combined, parts=(positions.SSMax, LayerPattern)), per_layer=False)


class CumulativeSums(TorchDispatchMode):
    """Context that stores the dtype and the length of each cumulative sum, product, maximum and minimum."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[torch.dtype, int]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if "cum" in function.name():
            self.found.add((args[0].dtype, args[0].shape[args[1]]))
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 17, 70])
def test_fox_sums_gates_over_pieces_on_a_gpu(length: int) -> None:
    x = torch.randn(2, 3, length, dtype=torch.float64, requires_grad=True)
    with CumulativeSums() as sums_of_pieces:
        sums = cumulative_sums(x, size=4)
    expected = x.cumsum(-1)
    torch.testing.assert_close(sums, expected)
    weights = torch.randn_like(expected)
    torch.testing.assert_close(*(torch.autograd.grad(of, x, weights)[0] for of in (sums, expected)))
    assert sums_of_pieces.found
    assert all(size <= 4 for _, size in sums_of_pieces.found)


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_a_gpu_computes_no_long_cumulative_sums_in_fp64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch 2.11 cannot compile them for a GPU at 512 tokens. The device "meta", which computes nothing, replaces one.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # autocast does not know this device
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    with torch.device("meta"):
        network, tokens = Transformer(Shape(16, 2, 512), 1, 20, strategies()[name]), torch.zeros(1, 513).long()
    with CumulativeSums() as sums:
        network.losses(tokens)
    assert all(size <= 128 for dtype, size in sums.found if dtype.itemsize == 8)
    assert bool(sums.found) == (name in {"CoPE", "FoX", "StickBreaking"})
