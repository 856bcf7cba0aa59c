"""What holds for every strategy; a new one is covered by being there."""

import inspect
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kerple import positions as package
from kerple.model.transformer import Transformer
from kerple.positions import At, Pairs, Position, Shape, build, names
from kerple.positions.constrained import Constrained
from kerple.positions.products import product

LENGTH = 32
Make = Callable[..., Transformer]
over_names = pytest.mark.parametrize("name", names())


def options(name: str) -> dict[str, str]:
    """What lets a strategy go past its training length, where it does not by itself."""
    return {"Learned": {"beyond": "clamp"}}.get(name, {})


def make_position(name: str, length: int = LENGTH) -> Position:
    torch.manual_seed(0)
    return build(name, dim=32, heads=4, length=length).eval()


@over_names
def test_the_past_has_no_gradient_from_the_future(name: str, tiny_network: Make) -> None:
    network = tiny_network(name)
    embedded: list[Tensor] = []

    def keep(module: torch.nn.Module, args: tuple, x: Tensor) -> Tensor:
        embedded.append(x.detach().requires_grad_())
        return embedded[0]

    network.embedding.register_forward_hook(keep)
    logits = network(torch.randint(0, 50, (2, 30)))
    (logits[:, :20] * torch.randn(2, 20, 50)).sum().backward()

    reached = embedded[0].grad.abs().amax(-1)  # (2, 30)
    assert (reached[:, 20:] == 0).all()
    assert (reached[:, :20] > 0).all()


@over_names
def test_an_offset_changes_nothing_exactly_where_the_strategy_says_so(name: str, tiny_network: Make) -> None:
    network = tiny_network(name, **options(name))
    tokens = torch.randint(0, 50, (2, 24))

    moved = (network(tokens, offset=500) - network(tokens)).abs().max().item()

    if network.positions[0].shift_invariant:
        assert moved < 1e-4
    else:
        assert moved > 1e-3


@over_names
def test_the_logits_of_a_prefix_are_the_prefix_of_the_logits(name: str, tiny_network: Make) -> None:
    network = tiny_network(name)
    tokens = torch.randint(0, 50, (2, 30))

    torch.testing.assert_close(network(tokens[:, :17]), network(tokens)[:, :17], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "setting"),
    [("RoPE", {"scaling": "dynamic_ntk", "factor": 2.0}), ("Learned", {"beyond": "interpolate"})],
)
def test_what_depends_on_the_length_of_the_input_says_so(name: str, setting: dict, tiny_network: Make) -> None:
    network = tiny_network(name, length=16, **setting)
    tokens = torch.randint(0, 50, (2, 30))

    moved = (network(tokens[:, :20]) - network(tokens)[:, :20]).abs().max().item()

    assert moved > 1e-3
    assert not network.positions[0].prefix_consistent


@over_names
def test_reading_token_by_token_gives_what_reading_at_once_does(name: str, tiny_network: Make) -> None:
    network = tiny_network(name)
    tokens = torch.randint(0, 50, (2, 14))
    cache = network.new_cache()

    with torch.no_grad():
        pieces = [network(piece, cache=cache) for piece in (tokens[:, :9], *tokens[:, 9:].split(1, 1))]

        torch.testing.assert_close(torch.cat(pieces, 1), network(tokens), atol=1e-5, rtol=1e-4)


@over_names
def test_a_window_hides_what_is_before_it_and_nothing_else(name: str, tiny_network: Make) -> None:
    network = tiny_network(name)
    tokens = torch.randint(0, 50, (1, 30))
    changed = tokens.clone()
    changed[:, :10] = (tokens[:, :10] + 1) % 50

    with torch.no_grad():
        torch.testing.assert_close(network(tokens, window=30), network(tokens), atol=1e-5, rtol=1e-4)
        before, after = network(tokens, window=4), network(changed, window=4)

    # two layers of four keys reach six tokens back
    torch.testing.assert_close(before[:, 16:], after[:, 16:], atol=1e-5, rtol=1e-4)
    assert (before[:, 10:15] - after[:, 10:15]).abs().max() > 1e-3


def made_by(position: Position) -> dict[str, Tensor]:
    """Everything a strategy makes of fp32 input; positions above 256, which bf16 cannot tell apart."""
    torch.manual_seed(1)
    k, x = torch.randn(2, 4, 9, 8), torch.randn(2, 9, 32)
    at = At.line(9, 300 if position.max_length is None else 0)
    distance = torch.arange(3000).float()
    made = {"embed": position.embed(x, at), "bias": position.bias(distance), "weight": position.weight(distance)}
    memory = made["memory"] = position.remember(x, at, None)
    made["q"], made["k"] = position.project(k, k.flip(0), memory, at)
    q, s = made["q"][:, :, -5:], torch.randn(2, 4, 5, 9).tril(4)
    made["sink"] = position.sink(q, at[-5:])
    pairs = Pairs(at[-5:], at, torch.ones(5, 9, dtype=torch.bool).tril(4), memory)
    if position.uses("mix"):
        mixed = position.mix(s, q, made["k"], pairs)
        made["scores"], made["more"] = mixed if isinstance(mixed, tuple) else (mixed, None)
    if position.uses("values"):
        made["values"] = position.values(torch.rand(2, 4, 5, 9), k, pairs)
    return {what: tensor for what, tensor in made.items() if tensor is not None}


@over_names
def test_bf16_weights_and_autocast_leave_positions_in_fp32(name: str) -> None:
    position = make_position(name)
    expected = made_by(position)
    with torch.autocast("cpu", torch.bfloat16):
        autocast = made_by(position)
    halved = made_by(position.bfloat16())

    for what, tensor in expected.items():
        assert tensor.dtype in (torch.float32, torch.float64), what
        for got in (autocast, halved):
            torch.testing.assert_close(got[what], tensor, atol=0, rtol=0, msg=lambda m, what=what: f"{what}: {m}")


@over_names
def test_a_network_in_bf16_mixed_trains(name: str, tiny_network: Make) -> None:
    network = tiny_network(name).train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = network.losses(torch.randint(0, 50, (2, 25))).mean()
    loss.backward()

    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


@over_names
def test_logits_are_finite_at_64_times_the_training_length(name: str, tiny_network: Make) -> None:
    network = tiny_network(name, length=16, **options(name))

    with torch.no_grad():
        assert network(torch.randint(0, 50, (1, 64 * 16))).isfinite().all()


@over_names
def test_nothing_is_sized_by_the_training_length_but_the_learned_table(name: str) -> None:
    shapes = [[p.shape for p in make_position(name, length).parameters()] for length in (16, 64)]

    assert (shapes[0] == shapes[1]) == (name != "Learned")


@over_names
def test_ranges_survive_a_huge_learning_rate_and_the_checkpoint(name: str, tiny_network: Make, tmp_path) -> None:
    network = tiny_network(name)
    strategy = list(network.positions.parameters())
    for _ in range(3 if strategy else 0):
        network.losses(torch.randint(0, 50, (2, 25))).mean().backward()
        torch.optim.SGD(strategy, lr=1000.0).step()
        network.constrain_()
        network.zero_grad()
    torch.save(network.state_dict(), tmp_path / "last.ckpt")
    other = tiny_network(name)
    other.load_state_dict(torch.load(tmp_path / "last.ckpt", weights_only=True))

    checked = 0
    for module in other.positions.modules():
        if isinstance(module, Constrained):
            for parameter, (minimum, maximum) in module.ranges.items():
                values = getattr(module, parameter)
                assert ((values >= minimum) & (values <= maximum)).all(), parameter  # false for NaN too
                checked += 1
    assert all(p.isfinite().all() for p in other.positions.parameters())
    if name.startswith("Kerple"):
        assert checked == len(list(other.positions.parameters()))  # every parameter of KERPLE has a range


@over_names
def test_what_is_not_a_number_stays_so(name: str) -> None:
    """A run stops on NaN; a range that made the floor of it would hide where it arose."""
    position = make_position(name)
    for module in position.modules():
        if isinstance(module, Constrained):
            for parameter in module.ranges:
                getattr(module, parameter).data.fill_(float("nan"))
    position.constrain_()

    assert all(getattr(m, p).isnan().all() for m in position.modules() if isinstance(m, Constrained) for p in m.ranges)


class NoRoundedProducts(TorchDispatchMode):
    """Fails on every product of matrices that autocast or TF32 could round; `product` is an operator of its own."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert not re.match(r"aten\.(mm|bmm|addmm|baddbmm|mv|dot|linear|einsum)\b", str(function)), function
        return function(*args, **(kwargs or {}))


@over_names
def test_neither_autocast_nor_tf32_reaches_what_a_strategy_computes(name: str) -> None:
    position = make_position(name)
    with NoRoundedProducts():
        made = [x.sum() for x in made_by(position).values() if x.requires_grad]
        torch.autograd.backward(made)


def test_the_product_of_a_strategy_is_full_under_any_setting() -> None:
    a, b = torch.randn(2, 3, 5, 7, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    seen = []
    real = torch.matmul

    def matmul(x: Tensor, y: Tensor) -> Tensor:
        seen.append(("matmul", torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")))
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
    assert seen == [("matmul", "highest", False)] * 3
    wanted = torch.autograd.grad((a.double() @ b.double()).square().sum(), (a, b))
    for got, expected in zip((out, *grads), (a @ b, *wanted), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)
    exact = [x.detach().double().requires_grad_() for x in (a, b)]
    assert torch.autograd.gradcheck(product, exact)
    torch.library.opcheck(torch.ops.kerple.product.default, exact)


@over_names
def test_the_docstring_counts_the_parameters(name: str) -> None:
    strategy = type(make_position(name))
    formula = re.search(r"Parameters: `([^`]+)`", inspect.getdoc(strategy) or "")
    assert formula, f"{name}: its docstring needs a line 'Parameters: `formula`' in D, H, δ, L and its options"
    heads, dim, length = 6, 48, 24
    known = {k: p.default for k, p in inspect.signature(strategy).parameters.items()}
    expected = eval(formula[1], {}, known | {"D": dim, "H": heads, "δ": dim // heads, "L": length})

    assert sum(p.numel() for p in build(name, dim=dim, heads=heads, length=length).parameters()) == expected


@over_names
def test_gradients_reach_every_parameter(name: str, tiny_network: Make) -> None:
    network = tiny_network(name).train()
    network.losses(torch.randint(0, 50, (4, LENGTH + 1))).mean().backward()

    for parameter, value in network.named_parameters():
        assert value.grad is not None, parameter
        assert value.grad.abs().sum() > 0, parameter


@pytest.fixture(scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("ddp") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@over_names
@pytest.mark.usefixtures("process_group")
def test_ddp_finds_no_unused_parameter(name: str, tiny_network: Make) -> None:
    network = tiny_network(name).train()
    parallel = torch.nn.parallel.DistributedDataParallel(network)
    for _ in range(2):  # the second forward complains of what the first left without a gradient
        parallel(torch.randint(0, 50, (2, 25))).logsumexp(-1).mean().backward()
        network.constrain_()


@over_names
def test_one_instance_a_layer_exactly_where_the_strategy_says_so(name: str, tiny_network: Make) -> None:
    network = tiny_network(name)

    assert len(network.positions) == (2 if network.positions[0].per_layer else 1)


@over_names
def test_the_name_is_a_class_of_the_package_with_a_source(name: str) -> None:
    strategy = getattr(package, name)

    assert issubclass(strategy, Position)
    assert strategy.__name__ == name
    source = inspect.getdoc(strategy) + (inspect.getdoc(inspect.getmodule(strategy)) or "")
    assert re.search(r"arXiv\s\d{4}\.\d{5}|GPT-2", source) or name == "Together", "which paper?"


@over_names
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_network_computes_the_same(name: str, backend: str, tiny_network: Make) -> None:
    network = tiny_network(name)
    tokens = torch.randint(0, 50, (2, 20))
    expected = network(tokens)
    torch.compiler.reset()
    network.compile(backend=backend)

    torch.testing.assert_close(network(tokens), expected, atol=1e-4, rtol=1e-4)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"position: got 'Alibi', expected one of ALiBi, .*XPos"):
        build("Alibi", dim=32, heads=4, length=16)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((32, 5, 16), "heads: got 5, which does not divide dim 32"),
        ((32, 4, 0), "length: got 0"),
        ((0, 4, 16), "dim: got 0"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(shape: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Shape(*shape)
