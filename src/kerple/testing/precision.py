"""Properties of precision: a strategy computes in fp32 in any surroundings."""

import copy
import re

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kerple.attention import attend
from kerple.attention.reference import attend_reference
from kerple.positions import AttentionWeights, Position, QueryKeyBlock, TokenPositions
from kerple.positions.wrapper import Wrapper
from kerple.testing.subject import Subject, attended, holds, same, tokens


@holds
def bf16_weights_and_autocast_leave_positions_in_fp32(subject: Subject) -> None:
    """What the hooks return is fp32, and equal in every bit, under autocast and after ``.bfloat16()``."""
    expected = made_by(subject.position())
    with torch.autocast("cpu", torch.bfloat16):
        autocast = made_by(subject.position())
    halved = made_by(subject.position().bfloat16())
    for what, tensor in expected.items():
        assert tensor.dtype in (torch.float32, torch.float64), f"{what} is {tensor.dtype}, expected fp32 or better"
        same(autocast[what], tensor, f"{what} under autocast", 0, 0)
        same(halved[what], tensor, f"{what} with weights in bf16", 0, 0)


@holds
def bf16_true_keeps_parameters_in_fp32(subject: Subject) -> None:
    """Parameters are fp32 even if the default dtype is bf16 while the strategy is built, as with bf16-true."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        network = subject.network().bfloat16()
        logits = network(tokens(2, 20))
    finally:
        torch.set_default_dtype(usual)
    assert logits.isfinite().all(), "logits are not finite"
    for name, parameter in network.positions.named_parameters():
        assert parameter.dtype == torch.float32, f"{name} is {parameter.dtype}"


@holds
def it_trains_in_bf16_mixed(subject: Subject) -> None:
    """A loss under bf16 autocast gives every parameter a finite gradient."""
    network = subject.network().train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = network.losses(tokens(2, 25)).mean()
    loss.backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        assert parameter.grad.isfinite().all(), f"the gradient of {name} is not finite"


# torch's matrix products and convolutions, which autocast and TF32 change
ROUNDED = "mm|bmm|addmm|addbmm|baddbmm|mv|addmv|addr|dot|vdot|linear|einsum|convolution"


class _NoRoundedProducts(TorchDispatchMode):
    # `products.product` is an operator of its own
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        rounded = re.match(rf"aten\.({ROUNDED})_?(_backward\w*)?\.", str(function))
        assert not rounded, f"{function}: autocast or TF32 may round it; multiply by kerple.positions.products.product"
        return function(*args, **(kwargs or {}))


@holds
def neither_autocast_nor_tf32_reaches_what_it_computes(subject: Subject) -> None:
    """No hook dispatches one of torch's own matrix products, forward or backward."""
    position = subject.position()
    with _NoRoundedProducts():
        torch.autograd.backward([x.sum() for x in made_by(position).values() if x.requires_grad])


@holds
@torch.no_grad()
def bf16_costs_no_more_precision_than_in_the_fused_way(subject: Subject) -> None:
    """With bf16 input, the error against fp64 is about that of torch's fused kernel without the strategy.

    Scores have a standard deviation of 3. If they were rounded to bf16, the error would be two to four times as large.
    Rounding probabilities after they are normalised, as in blocks, costs a quarter, and `add_to_output` as much again.
    """
    position, length = subject.network(layers=1).positions[0], subject.reach(300)
    random = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, length, 8, generator=random)
    q, k, v = (x.bfloat16() for x in (q * 3**0.5, k * 3**0.5, v))
    x = torch.randn(2, length, 32, generator=random)
    # projections round to bf16 themselves, in every way alike
    at = TokenPositions.line(length)
    there = *position.transform_qk(q, k, position.token_state(x, at, None), at), v, x
    wide = there[0].double(), there[1].double(), v.double(), x.double()
    projected = Projected(position)
    ours = _relative(
        attended(attend, projected, *there),
        attended(attend_reference, copy.deepcopy(projected).double(), *wide),
    )
    fused = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    wanted = attend_reference(q.double(), k.double(), v.double())
    theirs = _relative(fused, wanted)
    assert ours <= 1.75 * theirs, f"relative error in bf16 {ours:.2g}, of the fused way {theirs:.2g}"


class Projected(Wrapper):
    """A strategy whose queries and keys have been projected already."""

    def __init__(self, position: Position) -> None:
        super().__init__(position)

    def transform_qk(self, q: Tensor, k: Tensor, state: Tensor | None, at: TokenPositions) -> tuple[Tensor, Tensor]:
        return q, k


def _relative(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


def made_by(position: Position) -> dict[str, Tensor]:
    """The results of all hooks for fp32 input, at positions above 256, which bf16 cannot tell apart."""
    torch.manual_seed(1)
    k, x = torch.randn(2, 4, 9, 8), torch.randn(2, 9, 32)
    at = position.remap_positions(
        TokenPositions.line(9, 300 if position.max_length is None else 0), torch.zeros(2, 9, dtype=torch.int64)
    )
    distance = torch.arange(3000).float()
    made: dict[str, Tensor | None] = {
        "embed": position.embed(x, at),
        "bias": position.bias(distance),
        "weight": position.weight(distance),
    }
    state = made["state"] = position.token_state(x, at, None)
    made["q"], made["k"] = q, projected = position.transform_qk(k, k.flip(0), state, at)
    q, s = q[:, :, -5:], torch.randn(2, 4, 5, 9).tril(4)
    made["sink_logit"] = position.sink_logit(q, at[-5:])
    block = QueryKeyBlock(at[-5:], at, torch.ones(5, 9, dtype=torch.bool).tril(4), state)
    if position.uses("modify_scores"):
        mixed = position.modify_scores(s, q, projected, block)
        mixed = mixed.p if isinstance(mixed, AttentionWeights) else mixed
        made["scores"], made["sink of mix"] = mixed if isinstance(mixed, tuple) else (mixed, None)
    if position.uses("add_to_output"):
        made["add_to_output"] = position.add_to_output(torch.rand(2, 4, 5, 9), k, block)
    return {what: tensor for what, tensor in made.items() if tensor is not None}
