"""Tests of gradients, of the ranges of parameters, of long inputs, and of the sizes of tensors."""

import re
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from kerple.attention import AttentionSpec
from kerple.attention.query_block_attention import attend_blocks
from kerple.base.errors import UserError, describe
from kerple.model import Transformer
from kerple.positions import Position
from kerple.positions.constrained_parameters import Constrained
from kerple.testing.subject import (
    SHORT,
    VOCABULARY,
    DoesNotApply,
    Subject,
    change_parameters,
    holds,
    holds_at_lengths,
    same,
    tokens,
)


def trained(network: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the names and parameters that an optimiser updates."""
    return [(name, parameter) for name, parameter in network.named_parameters() if parameter.requires_grad]


@holds_at_lengths
def gradient_of_every_parameter(subject: Subject, length: int) -> None:
    """Every parameter of the network that is trained has a finite, nonzero gradient."""
    network = subject.network(length).train()
    network.losses(tokens(2, length + 1)).mean().backward()
    for name, parameter in trained(network):
        assert parameter.grad is not None, f"{name} has no gradient"
        assert parameter.grad.abs().sum() > 0, f"the gradient of {name} is 0"
        assert parameter.grad.isfinite().all(), f"the gradient of {name} is not finite"


# steps of finite differences in fp64, with relative and absolute tolerances: the first is so small that few arguments
# of functions such as ReLU cross a kink; the second is so large that a strategy may compute in fp32
STEPS = ((1e-7, 1e-3, 1e-7), (1e-3, 0.05, 1e-4))


@holds
def derivatives_of_losses(subject: Subject) -> None:
    """Gradients are the derivatives of the losses.

    In fp64, the gradients for the weights of queries, keys and values and for each parameter of the strategy are
    compared with finite differences in a random direction.
    """
    network, ids = subject.network(60).double(), tokens(2, 61)
    network.losses(ids).mean().backward()
    generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def difference(parameter: nn.Parameter, direction: Tensor, step: float) -> float:
        before, losses = parameter.clone(), []
        for signed in (step, -step):
            parameter.copy_(before + signed * direction)
            losses.append(float(network.losses(ids).mean()))
        parameter.copy_(before)
        return (losses[0] - losses[1]) / (2 * step)

    for name, parameter in trained(network):
        if parameter.grad is not None and (".qkv." in name or name.startswith("positions.")):
            direction = torch.randn(parameter.shape, generator=generator).to(parameter)
            got = float((parameter.grad * direction).sum())
            for step, relative, absolute in STEPS:
                expected = difference(parameter, direction, step)
                if equal := abs(got - expected) <= absolute + relative * abs(expected):
                    break
            assert equal, f"the derivative for {name} is {got:.4g}, finite differences give {expected:.4g}"


@holds
def activation_checkpointing(subject: Subject) -> None:
    """Activation checkpointing changes neither losses nor gradients.

    The two results are equal bit for bit. A strategy that keeps tensors between calls of its hooks may fail.
    """
    network, checkpointing = (subject.network(150).train() for _ in range(2))
    checkpointing.checkpoint_activations = True
    compare_gradients(network, checkpointing, "with activation checkpointing")


@holds
def blocks_computed_again(subject: Subject) -> None:
    """Attention that computes blocks of queries again in the backward pass has the same losses and gradients.

    Inputs of many tokens are trained in this way. The results are equal bit for bit. When a block of the first layer is
    computed again, hooks of the later layers have been called. A strategy that keeps tensors of a layer may fail.
    """
    storing, recomputing = (subject.network(150).train() for _ in range(2))
    for network, largest_stored in ((storing, None), (recomputing, 0)):
        for block in network.blocks:
            block.attention.attend = partial(_attend_blocks, largest_stored=largest_stored)
    compare_gradients(
        storing, recomputing, "if blocks of queries are computed again; pass tensors in token_state, not on self"
    )


def _attend_blocks(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, _: str, largest_stored: int | None) -> Tensor:
    return attend_blocks(q, k, v, spec, largest_stored=largest_stored)


def compare_gradients(first: Transformer, second: Transformer, condition: str) -> None:
    """Compare losses and gradients of two networks bit for bit; ``condition`` is that of the second network."""
    results = []
    for network in (first, second):
        torch.manual_seed(0)
        losses = network.losses(tokens(2, 151))
        losses.mean().backward()
        results.append([losses, *(parameter.grad for _, parameter in trained(network))])
    for name, a, b in zip(["losses", *(name for name, _ in trained(first))], *results, strict=True):
        assert torch.equal(a, b), f"{name} or its gradient differs {condition}"


@holds
def ranges_of_parameters(subject: Subject) -> None:
    """Parameters are finite and in their ranges after steps with learning rate 1,000.

    Each of the three steps of SGD is followed by `constrain_`. The parameters are then loaded into another network by a
    state dict, and tested there.
    """
    network = subject.network()
    parameters = list(network.positions.parameters())
    for _ in range(3 if parameters else 0):
        network.losses(tokens(2, 25)).mean().backward()
        torch.optim.SGD(parameters, lr=1000.0).step()
        network.constrain_()
        network.zero_grad()
    other = subject.network()
    other.load_state_dict(network.state_dict())
    for module in other.positions.modules():
        for name, (minimum, maximum) in module.ranges.items() if isinstance(module, Constrained) else ():
            values = getattr(module, name)
            assert ((values >= minimum) & (values <= maximum)).all(), f"{name} is outside {minimum:g} to {maximum:g}"
    assert all(p.isfinite().all() for p in other.positions.parameters()), "a parameter is not finite"


@holds
def state_dict_is_complete(subject: Subject) -> None:
    """A network that is loaded from a state dict has the same logits.

    The first network makes three training passes. The second one is built with other random numbers. The test is
    repeated with other parameters, because the first network may have kept results of the earlier ones.
    """
    network = subject.network(SHORT).train()
    for _ in range(3):
        network.losses(tokens(2, 26))
        network.constrain_()
    for advice in (
        "register numbers that change or are random as buffers",
        "keep no results that depend on parameters, which training changes between evaluations",
    ):
        torch.default_generator.manual_seed(1)  # another seed than that of `Subject.network`
        loaded = Transformer(network.shape, len(subject.layers), VOCABULARY, subject.build_layer)
        loaded.load_state_dict(network.state_dict())
        with torch.no_grad():
            got, expected = (n.eval()(tokens(2, SHORT)) for n in (loaded, network))
        same(got, expected, f"logits after loading; {advice}", 0, 0)
        change_parameters(network.train())


@holds
def nan_in_parameters(subject: Subject) -> None:
    """NaN in a parameter stays NaN after `constrain_`.

    A run with NaN then stops. If `constrain_` replaced NaN by a bound, the run would continue with a wrong model.
    """
    positions = subject.network().positions
    parameters = list(positions.parameters())
    for parameter in parameters:
        parameter.data.fill_(float("nan"))
    for position in positions:
        position.constrain_()
    assert all(parameter.isnan().all() for parameter in parameters), "constrain_ replaces NaN by a number"


@holds
@torch.no_grad()
def finite_logits_at_64_times_the_training_length(subject: Subject) -> None:
    """Logits at 64 times the training length are finite, or a UserError is raised.

    The training length is 16. Only a strategy with a ``max_length`` may raise the error.
    """
    network = subject.network(trained=16)
    try:
        logits = network(tokens(1, 64 * 16))
    except UserError:
        assert any(p.max_length is not None for p in network.positions), "UserError at 1,024 tokens, but no max_length"
        return
    assert logits.isfinite().all(), "logits at 64 times the training length are not finite"


@holds
def sizes_of_tensors(subject: Subject) -> None:
    """Sizes of parameters, buffers and other tensors do not depend on the training length.

    This does not apply to a strategy with a ``max_length``. It does not apply if the docstring states a number of
    parameters that depends on the training length L.
    """
    layers = [layer for layer in subject.distinct_layers if not has_table_of_positions(subject.position(layer=layer))]
    if not layers:
        raise DoesNotApply("it has a table of positions")
    sizes = []
    for length in (16, 64):
        modules = chain.from_iterable(subject.position(length, layer).modules() for layer in layers)
        attributes = chain.from_iterable((*m.parameters(False), *m.buffers(False), *vars(m).values()) for m in modules)
        sizes.append([tuple(a.shape) for a in attributes if isinstance(a, Tensor)])
    assert sizes[0] == sizes[1], f"shapes of tensors are {sizes[0]} at training length 16, and {sizes[1]} at 64"


@holds
def tensors_are_registered(subject: Subject) -> None:
    """Tensors of the strategy are parameters or buffers.

    The model does not move other tensors to a GPU.
    """
    for layer in subject.distinct_layers:
        for name, value in chain.from_iterable(vars(m).items() for m in subject.position(layer=layer).modules()):
            if name not in ("_parameters", "_buffers"):
                plain = any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
                assert not plain, f"{name} is a plain tensor; use nn.Buffer(tensor, persistent=False)"


@holds
def building_without_values(subject: Subject) -> None:
    """The strategy can be built on the meta device, where tensors have shapes but no values.

    The cost of a run, and the strategy of a stored model, are computed there.
    """
    try:
        with torch.device("meta"):
            for layer in subject.distinct_layers:
                subject.position(layer=layer)
    except Exception as error:
        raise AssertionError(f"it reads a value of a tensor when it is built: {describe(error)}") from error


def has_table_of_positions(position: Position) -> bool:
    """Whether a strategy has a ``max_length``, or its docstring or that of an inner strategy states it with L."""
    inner = [type(module).__doc__ or "" for module in position.modules() if isinstance(module, Position)]
    return position.max_length is not None or any(re.search(r"Parameters: `[^`]*\bL\b", text) for text in inner)
