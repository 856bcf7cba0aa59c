"""The network at pairs against its formula, in one piece and in many."""

import pytest
import torch
from torch.library import opcheck
from torch.nn import functional as F

from kerple.positions import pair_network as module
from kerple.positions.pair_network import pair_network


def given(shared: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    """s, b, into, bias, out of 3 sequences, 2 heads, 23 pairs and 5 hidden numbers."""
    sizes = [(3, 2, 23), (2, 23) if shared else (3, 2, 23), (5, 4), (5,), (2, 5)]
    return [torch.randn(size, dtype=dtype, requires_grad=True) for size in sizes]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("hidden", [15, 60, 2**18])  # a pair, four pairs, all pairs at once
def test_values_and_gradients_are_those_of_the_formula(shared: bool, hidden: int, monkeypatch) -> None:
    monkeypatch.setattr(module, "HIDDEN", hidden)
    s, b, into, bias, out = inputs = given(shared, torch.float64)
    at_each = torch.cat([s, b.expand_as(s)], 1)  # (B, 2H, N)
    wanted = torch.einsum("hc,bcn->bhn", out, F.leaky_relu(torch.einsum("ci,bin->bcn", into, at_each) + bias[:, None]))
    grad = torch.randn_like(wanted)
    got = pair_network(*inputs)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(got, inputs, grad), torch.autograd.grad(wanted, inputs, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shared", [True, False])
def test_the_operators_keep_torch_s_contract(shared: bool) -> None:
    inputs = given(shared, torch.float32)
    opcheck(torch.ops.kerple.pair_network.default, tuple(inputs))
    plain = [x.detach() for x in inputs]
    opcheck(torch.ops.kerple.pair_network_backward.default, (torch.randn(3, 2, 23), *plain))
