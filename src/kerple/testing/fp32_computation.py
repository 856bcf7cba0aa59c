"""Tests of precision: a strategy computes in fp32 or fp64, regardless of autocast and the dtype of the weights."""

import copy
import re
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kerple.attention import attend
from kerple.attention.reference import attend_reference
from kerple.model.self_attention import PositionContext, spec_of
from kerple.positions import Position, TokenPositions
from kerple.testing.parameters import trained
from kerple.testing.subject import Subject, holds, holds_at_lengths, results_of_hooks, same, tokens


@holds_at_lengths
def hooks_in_fp32(subject: Subject, length: int) -> None:
    """Autocast and weights in bf16 do not change the results of hooks other than `transform_output`.

    Hooks are the methods of a strategy that the model calls in a forward pass. Their results are fp32 or fp64. Under
    autocast or after ``.bfloat16()``, the results are bitwise equal to those with fp32 weights and no autocast. For
    bf16 input, their relative error is at most 1e-4. It is at most 0.02 for `embed` and `transform_qk`, whose results
    have the dtype of the input.
    """
    for layer in subject.distinct_layers:
        expected = results_of_hooks(subject.position(length, layer), length)
        with torch.autocast("cpu", torch.bfloat16):
            autocast = results_of_hooks(subject.position(length, layer), length)
        bf16_weights = results_of_hooks(subject.position(length, layer).bfloat16(), length)
        bf16_input = results_of_hooks(subject.position(length, layer), length, torch.bfloat16)
        for what, tensor in expected.items():
            assert tensor.dtype in (torch.float32, torch.float64), f"{what} is {tensor.dtype}, expected fp32 or fp64"
            same(autocast[what], tensor, f"{what} under autocast", 0, 0)
            same(bf16_weights[what], tensor, f"{what} with weights in bf16", 0, 0)
            norm, error = tensor.double().norm(), (bf16_input[what].double() - tensor).norm()
            advice = "convert positions and input to fp32 before other operations"
            given = f"{what} for bf16 input has a relative error of {error / norm:.2g}; {advice}"
            assert error <= norm * (0.02 if what in ("embed", "q", "k") else 1e-4), given


@holds
def parameters_in_fp32(subject: Subject) -> None:
    """Parameters of the strategy stay in fp32 with the precision bf16-true.

    This precision builds the network with bf16 as the default dtype, and then calls ``.bfloat16()``.
    """
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        network = subject.network().bfloat16()
        logits = network(tokens(2, 20))
    finally:
        torch.set_default_dtype(default_dtype)
    assert logits.isfinite().all(), "logits are not finite"
    for name, parameter in network.positions.named_parameters():
        assert parameter.dtype == torch.float32, f"{name} is {parameter.dtype}, expected torch.float32"


@holds_at_lengths
def training_in_bf16_mixed(subject: Subject, length: int) -> None:
    """Every parameter that is trained has a finite gradient with the precision bf16-mixed."""
    network = subject.network(length).train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = network.losses(tokens(2, length + 1)).mean()
    loss.backward()
    for name, parameter in trained(network):
        assert parameter.grad is not None, f"{name} has no gradient"
        assert parameter.grad.isfinite().all(), f"the gradient of {name} is not finite"


# torch's matrix products and convolutions, whose factors autocast and TF32 round
ROUNDED = "mm|bmm|addmm|addbmm|baddbmm|mv|addmv|addr|dot|vdot|linear|einsum|convolution"


class _NoRoundedProducts(TorchDispatchMode):
    """Mode in which torch's matrix products raise an error; `kerple.positions.fp32_matmul.product` raises none."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        rounded = re.match(rf"aten\.({ROUNDED})_?(_backward\w*)?\.", str(function))
        advice = "autocast or TF32 may round it; use kerple.positions.fp32_matmul.product instead"
        assert not rounded, f"{function}: {advice}"
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            low = isinstance(tensor, Tensor) and tensor.dtype in (torch.bfloat16, torch.float16)
            assert not low, f"{function} returns {tensor.dtype}; compute in fp32"
        return result


@holds_at_lengths
def no_rounded_products(subject: Subject, length: int) -> None:
    """Hooks other than `transform_output` use no matrix product that autocast or TF32 rounds, forward or backward."""
    for layer in subject.distinct_layers:
        position = subject.position(length, layer)
        with _NoRoundedProducts():
            torch.autograd.backward([x.sum() for x in results_of_hooks(position, length).values() if x.requires_grad])


@holds_at_lengths
@torch.no_grad()
def error_in_bf16(subject: Subject, length: int) -> None:
    """With bf16 input, the error of the output is at most 1.75 times that of fused attention.

    The error is the distance from the output in fp64, relative to its norm. Fused attention is torch's kernel without
    the strategy. Scores have a standard deviation of 3. Rounding them to bf16 would increase the error by a factor of
    two to four. Rounding normalised probabilities to bf16, as attention in blocks of queries does on processors that
    multiply bf16, increases it by a quarter. `add_to_output` also increases it by a quarter. The bf16 and fp64 outputs
    of the strategy start from the same rounded results of `transform_qk`, because every implementation of attention
    rounds these.
    """
    ids = torch.zeros(2, length, dtype=torch.int64)
    random = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, length, 8, generator=random)
    q, k, v = (x.bfloat16() for x in (q * 3**0.5, k * 3**0.5, v))
    x = torch.randn(2, length, 32, generator=random)
    fused = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    fused_error = _relative_error(fused, attend_reference(q.double(), k.double(), v.double()))

    def output(attend: Callable[..., Tensor], position: Position, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        context = PositionContext(position, TokenPositions.arange(length), ids)
        state = position.token_state(x, context.positions, None)
        return attend(q, k, v, spec_of(position, context, q, v, state))

    for position in subject.network(length).positions:
        positions = PositionContext(position, TokenPositions.arange(length), ids).positions
        inputs = *position.transform_qk(q, k, position.token_state(x, positions, None), positions), v
        exact = output(attend_reference, copy.deepcopy(position).double(), *(y.double() for y in (x, *inputs)))
        error = _relative_error(output(attend, position, x, *inputs), exact)
        assert error <= 1.75 * fused_error, f"relative error in bf16 {error:.2g}, of fused attention {fused_error:.2g}"


def _relative_error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())
