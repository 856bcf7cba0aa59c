"""Strategies whose attention is fused or in tiles on a CPU, in a network: equal to explicit attention of all pairs.

Explicit attention is compared with loops over the papers' formulas in tests/positions/test_loops.py.
"""

from functools import partial

import pytest
import torch
from torch import Tensor

from kerple import positions
from kerple.model import Transformer
from kerple.positions.visibility import EVERYTHING, Visibility
from kerple.testing.forward_pass import VOCABULARY
from kerple.testing.subject import Subject

LENGTH = 150
STRATEGIES = {
    "FoX": positions.FoX,
    "FIRE": positions.FIRE,
    "KerpleWeight2": positions.KerpleWeight2,
    "KerpleBiasWeight": positions.KerpleBiasWeight,
    "LearnedRelativeBias, short": partial(positions.LearnedRelativeBias, extent=7),  # near and far keys
    "LearnedRelativeBias, longer than the input": partial(positions.LearnedRelativeBias, extent=2 * LENGTH),
    "Shaw": partial(positions.Shaw, clip=5),
    "Shaw, clip 0": partial(positions.Shaw, clip=0),
}
VIEWS = {"full": EVERYTHING, "window": Visibility(70), "first keys": Visibility(70, 3)}
pytestmark = pytest.mark.slow


def networks(name: str) -> tuple[Transformer, Transformer]:
    """Return two fp64 networks with equal weights and grouped heads: the usual one, and one with explicit attention."""
    usual, explicit = (Subject(STRATEGIES[name]).network(LENGTH, kv_heads=2).double() for _ in range(2))
    explicit.attention = "reference"
    return usual, explicit


def tokens_and_documents() -> tuple[Tensor, Tensor]:
    """Return tokens (2, LENGTH + 1), and the number of the document of each of them."""
    tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return tokens, torch.stack([torch.arange(LENGTH + 1) >= start for start in (9, 80)]).long()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_losses_and_gradients_are_those_of_explicit_attention(name: str, view: str, masked: bool) -> None:
    tokens, documents = tokens_and_documents()
    results = []
    for network in networks(name):
        losses = network.losses(tokens, None, VIEWS[view], documents=documents if masked else None)
        gradients = torch.autograd.grad(losses.sum(), list(network.parameters()), materialize_grads=True)
        results.append((losses, gradients))
    torch.testing.assert_close(results[0], results[1], atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("view", ["full", "window"])  # with a window, the cache drops earlier tokens
@pytest.mark.parametrize("name", STRATEGIES)
@torch.no_grad()
def test_logits_with_a_cache_are_those_of_explicit_attention(name: str, view: str) -> None:
    usual, explicit = networks(name)
    tokens, cache = tokens_and_documents()[0], usual.new_cache(VIEWS[view])
    pieces = tokens.split([2, 80, 1, 1, 60, *[1] * 7], 1)
    got = torch.cat([usual(piece, VIEWS[view], cache=cache) for piece in pieces], 1)
    torch.testing.assert_close(got, explicit(tokens, VIEWS[view]), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "largest"), [(torch.float32, 2e-5), (torch.float16, 3e-2), (torch.bfloat16, 2e-1)], ids=str
)
@pytest.mark.parametrize("name", STRATEGIES)
def test_losses_in_lower_precision_are_near_those_of_explicit_attention(
    name: str, dtype: torch.dtype, largest: float
) -> None:
    usual, explicit = networks(name)
    tokens = tokens_and_documents()[0]
    exact = explicit.losses(tokens)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        losses = usual.float().losses(tokens)
    losses.mean().backward()
    assert (losses - exact).abs().max() < largest
    assert all(p.grad is None or p.grad.isfinite().all() for p in usual.parameters())
