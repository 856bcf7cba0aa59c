"""Properties of training: gradients, ranges of parameters, sizes."""

import re
from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor, nn

from kerple.base.errors import UserError
from kerple.positions.constrained import Constrained
from kerple.testing.subject import DoesNotApply, Subject, holds, holds_at_lengths, tokens


@holds_at_lengths
def gradients_reach_every_parameter(subject: Subject, length: int) -> None:
    """After one backward pass every parameter of the network has a finite, nonzero gradient."""
    network = subject.network(length).train()
    network.losses(tokens(2, length + 1)).mean().backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        assert parameter.grad.abs().sum() > 0, f"the gradient of {name} is 0"
        assert parameter.grad.isfinite().all(), f"the gradient of {name} is not finite"


@holds
def ranges_survive_a_huge_learning_rate_and_the_checkpoint(subject: Subject) -> None:
    """After SGD with learning rate 1,000, `constrain_` and a state dict, parameters are finite and in their ranges."""
    network = subject.network()
    learned = list(network.positions.parameters())
    for _ in range(3 if learned else 0):
        network.losses(tokens(2, 25)).mean().backward()
        torch.optim.SGD(learned, lr=1000.0).step()
        network.constrain_()
        network.zero_grad()
    other = subject.network()
    other.load_state_dict(network.state_dict())
    for name, values, minimum, maximum in parameters_with_ranges(other.positions):
        assert ((values >= minimum) & (values <= maximum)).all(), f"{name} is outside {minimum:g} to {maximum:g}"
    assert all(p.isfinite().all() for p in other.positions.parameters()), "a parameter is not finite"


@holds
def what_is_not_a_number_stays_so(subject: Subject) -> None:
    """`constrain_` keeps NaN, so that the run stops instead of continuing with a bound."""
    position = subject.position()
    parameters = [parameter for _, parameter, *_ in parameters_with_ranges(position)]
    for parameter in parameters:
        parameter.data.fill_(float("nan"))
    position.constrain_()
    assert all(parameter.isnan().all() for parameter in parameters), "constrain_ makes a number of NaN"


def parameters_with_ranges(strategies: nn.Module) -> Iterator[tuple[str, Tensor, float, float]]:
    """Yield name, value, minimum and maximum of each parameter with a range."""
    for module in strategies.modules():
        for name, limits in module.ranges.items() if isinstance(module, Constrained) else ():
            yield name, getattr(module, name), *limits


@holds
@torch.no_grad()
def logits_are_finite_at_64_times_the_training_length_or_it_is_refused(subject: Subject) -> None:
    """Logits of 1,024 tokens are finite with a training length of 16, or ``max_length`` raises a UserError."""
    network = subject.network(trained=16)
    try:
        logits = network(tokens(1, 64 * 16))
    except UserError:
        assert any(p.max_length is not None for p in network.positions), "refused, but max_length is None"
        return
    assert logits.isfinite().all(), "logits at 64 times the training length are not finite"


@holds
def nothing_is_sized_by_the_training_length(subject: Subject) -> None:
    """Parameters, buffers and other tensors have the same shapes at two training lengths.

    It does not apply if the docstring's formula contains L, or if `max_length` limits the positions.
    """
    position = subject.position()
    if position.max_length is not None or re.search(r"Parameters: `[^`]*\bL\b", type(position).__doc__ or ""):
        raise DoesNotApply("it has a table of positions")
    sizes = []
    for length in (16, 64):
        modules = subject.position(length).modules()
        attributes = chain.from_iterable((*m.parameters(False), *m.buffers(False), *vars(m).values()) for m in modules)
        sizes.append([tuple(a.shape) for a in attributes if isinstance(a, Tensor)])
    assert sizes[0] == sizes[1], f"parameters, buffers and other tensors of {sizes[0]} at 16 tokens, {sizes[1]} at 64"
