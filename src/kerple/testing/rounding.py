"""Properties of precision: a strategy computes in fp32, regardless of autocast and the dtype of the weights."""

import copy
import re
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kerple.attention import attend
from kerple.attention.reference import attend_reference
from kerple.model.self_attention import prepare_context, spec_of
from kerple.positions import AttentionWeights, Position, QueryKeyBlock, TokenPositions
from kerple.testing.subject import Subject, holds, holds_at_lengths, same, tokens


@holds_at_lengths
def bf16_weights_and_autocast_leave_positions_in_fp32(subject: Subject, length: int) -> None:
    """Results of hooks are fp32, and bitwise equal, under autocast and after ``.bfloat16()``."""
    expected = results_of_hooks(subject.position(length), length)
    with torch.autocast("cpu", torch.bfloat16):
        autocast = results_of_hooks(subject.position(length), length)
    halved = results_of_hooks(subject.position(length).bfloat16(), length)
    for what, tensor in expected.items():
        assert tensor.dtype in (torch.float32, torch.float64), f"{what} is {tensor.dtype}, expected fp32 or better"
        same(autocast[what], tensor, f"{what} under autocast", 0, 0)
        same(halved[what], tensor, f"{what} with weights in bf16", 0, 0)


@holds
def bf16_true_keeps_parameters_in_fp32(subject: Subject) -> None:
    """Parameters are fp32 even if the strategy is built with bf16 as the default dtype, as with bf16-true."""
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        network = subject.network().bfloat16()
        logits = network(tokens(2, 20))
    finally:
        torch.set_default_dtype(default_dtype)
    assert logits.isfinite().all(), "logits are not finite"
    for name, parameter in network.positions.named_parameters():
        assert parameter.dtype == torch.float32, f"{name} is {parameter.dtype}"


@holds_at_lengths
def it_trains_in_bf16_mixed(subject: Subject, length: int) -> None:
    """A loss under bf16 autocast gives every parameter a finite gradient."""
    network = subject.network(length).train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = network.losses(tokens(2, length + 1)).mean()
    loss.backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        assert parameter.grad.isfinite().all(), f"the gradient of {name} is not finite"


# torch's matrix products and convolutions, which autocast and TF32 round
ROUNDED = "mm|bmm|addmm|addbmm|baddbmm|mv|addmv|addr|dot|vdot|linear|einsum|convolution"


class _NoRoundedProducts(TorchDispatchMode):
    # `products.product` is a separate operator
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        rounded = re.match(rf"aten\.({ROUNDED})_?(_backward\w*)?\.", str(function))
        assert not rounded, f"{function}: autocast or TF32 may round it; multiply by kerple.positions.products.product"
        return function(*args, **(kwargs or {}))


@holds_at_lengths
def neither_autocast_nor_tf32_reaches_what_it_computes(subject: Subject, length: int) -> None:
    """No hook calls a matrix product of torch, forward or backward."""
    position = subject.position(length)
    with _NoRoundedProducts():
        results = results_of_hooks(position, length).values()
        torch.autograd.backward([x.sum() for x in results if x.requires_grad])


@holds_at_lengths
@torch.no_grad()
def bf16_costs_no_more_precision_than_in_fused_attention(subject: Subject, length: int) -> None:
    """With bf16 input, the error against fp64 is at most 1.75 times that of torch's fused kernel without the strategy.

    Scores have a standard deviation of 3. Rounding them to bf16 would increase the error by a factor of two to four.
    Rounding normalised probabilities, as in blocks, increases it by a quarter, and so does `add_to_output`. Queries and
    keys are compared after `transform_qk`, because it rounds them in any implementation of attention.
    """
    position, ids = subject.network(length).positions[0], torch.zeros(2, length, dtype=torch.int64)
    random = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, length, 8, generator=random)
    q, k, v = (x.bfloat16() for x in (q * 3**0.5, k * 3**0.5, v))
    x = torch.randn(2, length, 32, generator=random)
    fused = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    theirs = _relative(fused, attend_reference(q.double(), k.double(), v.double()))

    def output(attend: Callable[..., Tensor], position: Position, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        context = prepare_context(position, TokenPositions.arange(length), ids)
        state = position.token_state(x, context.positions, None)
        return attend(q, k, v, spec_of(position, context, q, v, state))

    context = prepare_context(position, TokenPositions.arange(length), ids)
    q, k = position.transform_qk(q, k, position.token_state(x, context.positions, None), context.positions)
    exact = output(attend_reference, copy.deepcopy(position).double(), *(tensor.double() for tensor in (x, q, k, v)))
    ours = _relative(output(attend, position, x, q, k, v), exact)
    assert ours <= 1.75 * theirs, f"relative error in bf16 {ours:.2g}, of fused attention {theirs:.2g}"


def _relative(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def results_of_hooks(position: Position, length: int) -> dict[str, Tensor]:
    """Return the results of all hooks for fp32 input at positions from 300 on, which bf16 would round."""
    torch.manual_seed(1)
    k, x = torch.randn(2, 4, length, 8), torch.randn(2, length, 32)
    positions = TokenPositions.arange(length, 300 if position.max_length is None else 0)
    positions = position.remap_positions(positions, torch.zeros(2, length, dtype=torch.int64))
    distance = torch.arange(3000).float()
    results: dict[str, Tensor | None] = {
        "embed": position.embed(x, positions),
        "bias": position.bias(distance),
        "score_scale": position.score_scale(distance),
    }
    state = results["token_state"] = position.token_state(x, positions, None)
    results["q"], results["k"] = q, transformed = position.transform_qk(k, k.flip(0), state, positions)
    q, seen = q[:, :, -5:], torch.ones(5, length, dtype=torch.bool).tril(length - 5)
    results["sink_logit"] = position.sink_logit(q, positions[-5:])
    block = QueryKeyBlock(positions[-5:], positions, seen, state)
    if position.uses("modify_scores"):
        scores = position.modify_scores(torch.randn(2, 4, 5, length).masked_fill(~seen, 0), q, transformed, block)
        scores = scores.p if isinstance(scores, AttentionWeights) else scores
        results["scores"], results["sink of scores"] = scores if isinstance(scores, tuple) else (scores, None)
    if position.uses("add_to_output"):
        results["add_to_output"] = position.add_to_output(torch.rand(2, 4, 5, length), k, block)
    return {what: tensor for what, tensor in results.items() if tensor is not None}
