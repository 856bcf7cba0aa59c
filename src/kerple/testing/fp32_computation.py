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
from kerple.positions import AttentionWeights, Position, QueryKeyBlock, TokenPositions
from kerple.testing.parameters import trained
from kerple.testing.subject import Subject, holds, holds_at_lengths, same, tokens


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
    two to four. Rounding normalised probabilities to bf16, as attention in blocks of queries does, increases it by a
    quarter. `add_to_output` also increases it by a quarter. The bf16 and fp64 outputs of the strategy start from the
    same rounded results of `transform_qk`, because every implementation of attention rounds these.
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


def results_of_hooks(position: Position, length: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the results of all hooks for random input of this dtype, by name; the same numbers for each dtype.

    Positions begin at 3000, because bf16 rounds many integers above 256. With a ``max_length``, they begin at 0.

    Raises:
        AssertionError: If a hook modifies one of its arguments in place.
    """
    torch.manual_seed(1)

    def random(*shape: int) -> Tensor:
        return (torch.randint(-64, 65, shape) / 32).to(dtype)  # -2 to 2, without rounding in bf16

    k, x = random(2, 4, length, 8), random(2, length, 32)
    positions = TokenPositions.arange(length, 3000 if position.max_length is None else 0)
    positions = position.remap_positions(positions, torch.zeros(2, length, dtype=torch.int64))
    distance = torch.arange(3000).float()
    results: dict[str, Tensor | None] = {
        "embed": position.embed(x, positions),
        "bias": position.bias(distance),
        "score_scale": position.score_scale(distance),
    }
    state = results["token_state"] = position.token_state(x, positions, None)
    results["q"], results["k"] = _, transformed = position.transform_qk(k, k.flip(0), state, positions)
    results["key_bias"], results["value_bias"] = position.key_bias(state), position.value_bias()
    width, seen = transformed.shape[-1], torch.ones(5, length, dtype=torch.bool).tril(length - 5)
    # not the results of `transform_qk`, which are rounded in bf16
    q, transformed = random(2, 4, 5, width), random(2, 4, length, width)
    results["sink_logit"] = position.sink_logit(q, positions[-5:])
    query_bias = position.query_bias(q, state, positions[-5:])
    results["features"], results["curves"] = (None, None) if query_bias is None else query_bias
    block = QueryKeyBlock(positions[-5:], positions, seen, state)
    if position.uses("modify_scores"):
        scores = position.modify_scores(torch.randn(2, 4, 5, length).masked_fill(~seen, 0), q, transformed, block)
        scores = scores.p if isinstance(scores, AttentionWeights) else scores
        results["scores"], results["sink of scores"] = scores if isinstance(scores, tuple) else (scores, None)
    if position.uses("add_to_output"):
        results["add_to_output"] = position.add_to_output(random(2, 4, 5, length).abs() / 2, k, block)
    for what, tensor in {"distance": distance, "x": x, "k": k, "positions.ids": positions.ids}.items():
        assert not tensor._version, f"a hook modifies {what} in place; the next layer receives the modified tensor"
    return {what: tensor for what, tensor in results.items() if tensor is not None}
