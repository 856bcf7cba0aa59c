"""Sequences of several documents: losses, gradients and logits are those of each document as a separate input."""

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from kerple import positions
from kerple.base.errors import UserError
from kerple.model import Transformer
from kerple.positions import Shape, names, strategies
from kerple.positions.visibility import EVERYTHING, Visibility
from kerple.testing.forward_pass import VOCABULARY
from kerple.testing.subject import Subject

# first tokens of the documents of each sequence, and the number of input tokens
STARTS, LENGTH = [[0, 1, 9], [0, 20], [0]], 30
OPTIONS: dict[str, dict[str, Any]] = {
    "DAPE": {"hidden": 3},
    "DAPEv2": {"hidden": 3},
    "LayerPattern": {"kinds": {"a": positions.KerpleLog, "b": positions.RoPE}, "windows": {"a": 6}},
    "LearnedRelativeBias": {"rank": 3, "extent": 20, "temperature_length": 12},
    "Temperature": {"rule": "beam", "length": 6},
    "Learned, interpolate": {"beyond": "interpolate"},
    "RandomizedPositions, FoX": {"position": positions.FoX},
    "RoPE, dynamic_ntk": {"scaling": "dynamic_ntk", "factor": 2.0},
    "SSMax, bias": {"start": 0.0, "bias": 1.0},
    "StickBreaking, rest": {"rest": True},
    "TransformerXL, drawn": {},
    "Combined, four": {"parts": (positions.Sinusoidal, positions.FoX, positions.RoPE, positions.KerpleWeight1)},
}
BUILD = {name: partial(strategies()[name.split(",")[0]], **OPTIONS.get(name, {})) for name in (*names(), *OPTIONS)}
BUILD["TransformerXL, drawn"] = partial(positions.RandomizedPositions, position=positions.TransformerXL)
# strategies of the fast tests, at least one for each hook; the slow tests have every strategy
FAST = {"CoPE", "DAPEv2", "FIRE", "FoX", "KerpleBiasWeight", "Learned, interpolate", "RandomizedPositions, FoX", "XPos"}


def every_strategy(fast: set[str]) -> pytest.MarkDecorator:
    """Return the parameter ``name`` of a test with every strategy, of which those that are not ``fast`` are slow."""
    slow = [pytest.mark.slow]
    return pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in fast else slow) for name in BUILD])


def network_of(name: str) -> Transformer:
    """Return an fp64 network, whose training length is below that of the sequences if the strategy allows it."""
    return Subject(BUILD[name]).network(LENGTH, trained=LENGTH + 1 if name == "Learned" else 12).double()


def documents(starts: list[list[int]] = STARTS, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Return random tokens (B, length + 1), and the number of the document of each of them."""
    ids = torch.tensor([[sum(s <= m for s in row) for m in range(length + 1)] for row in starts])
    return torch.randint(VOCABULARY, ids.shape, generator=torch.Generator().manual_seed(0)), 7 - ids


def assert_equal_alone(network: Transformer, visibility: Visibility = EVERYTHING) -> None:
    """Compare logits, losses and gradients of sequences with those of each document as a separate input."""
    tokens, ids = documents()
    logits, losses = network(tokens, visibility, documents=ids), network.losses(tokens, None, visibility, documents=ids)
    parts = [(b, *ends) for b, row in enumerate(STARTS) for ends in pairwise([*row, LENGTH])]
    alone = torch.cat([network.losses(tokens[b : b + 1, i : j + 1], None, visibility)[0] for b, i, j in parts])
    torch.testing.assert_close(torch.cat([losses[b, i:j] for b, i, j in parts]), alone, atol=1e-12, rtol=1e-12)
    parameters = [p for p in network.parameters() if p.requires_grad]
    got, expected = (torch.autograd.grad(x.sum(), parameters, materialize_grads=True) for x in (losses, alone))
    torch.testing.assert_close(got, expected, atol=1e-11, rtol=1e-11)
    for b, i, j in parts:
        if j < LENGTH:  # the last document has one more token
            expected_logits = network(tokens[b : b + 1, i:j], visibility)[0]
            torch.testing.assert_close(logits[b, i:j], expected_logits, atol=1e-12, rtol=1e-12)


@every_strategy(FAST)
def test_documents_are_those_of_separate_inputs(name: str) -> None:
    assert_equal_alone(network_of(name))


@pytest.mark.parametrize("visibility", [Visibility(4), Visibility(4, 2)])
@every_strategy({"KerpleLog", "FoX", "SSMax", "SelfExtend", "XPos", "RoPE"})
def test_windows_and_first_tokens_count_from_the_first_token_of_a_document(name: str, visibility: Visibility) -> None:
    assert_equal_alone(network_of(name), visibility)


@every_strategy({"KerpleLog", "FoX", "PaTH", "XPos", "SSMax", "LayerPattern", "SelfExtend", "Sinusoidal"})
@torch.no_grad()
def test_a_cache_knows_the_documents_of_earlier_tokens(name: str) -> None:
    network, (tokens, ids) = network_of(name), documents()
    if not network.prefix_consistent:
        pytest.skip("logits depend on the length of the input")
    for visibility in (EVERYTHING, Visibility(4)):
        cache = network.new_cache(visibility)
        pieces = zip(tokens.split([5, 8, 1, 1, 16], 1), ids.split([5, 8, 1, 1, 16], 1), strict=True)
        got = torch.cat([network(x, visibility, cache=cache, documents=y) for x, y in pieces], 1)
        torch.testing.assert_close(got, network(tokens, visibility, documents=ids), atol=1e-12, rtol=1e-12)
    with pytest.raises(UserError, match="documents: got none, expected documents in all calls with a cache"):
        network(tokens[:, :1], visibility, cache=cache)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])  # which compiles C++
@every_strategy({"FoX", "Sinusoidal"})
def test_a_compiled_network_computes_the_same(name: str, backend: str) -> None:
    network, (tokens, ids) = network_of(name), documents()
    parameters = [p for p in network.parameters() if p.requires_grad]

    def losses_and_gradients() -> tuple[Tensor, tuple[Tensor, ...]]:
        losses = network.losses(tokens, documents=ids)
        return losses.detach(), torch.autograd.grad(losses.sum(), parameters, materialize_grads=True)

    losses, gradients = losses_and_gradients()
    torch.compiler.reset()
    network.compile(backend=backend, fullgraph=True)
    got_losses, got_gradients = losses_and_gradients()
    torch.testing.assert_close(got_losses, losses, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(got_gradients, gradients, atol=1e-11, rtol=1e-11)


@torch.no_grad()
def test_positions_may_continue_over_documents_which_changes_no_bias_by_distance() -> None:
    tokens, ids = documents()
    for name, changes in (("KerpleLog", False), ("T5", False), ("RoPE", False), ("Sinusoidal", True)):
        network = network_of(name)
        restarted = network(tokens, documents=ids)
        network.restart_positions = False
        difference = (network(tokens, documents=ids) - restarted).abs().max().item()
        assert difference > 1e-2 if changes else difference < 1e-12, name


@torch.no_grad()
def test_only_the_longest_document_must_fit_a_table_of_positions() -> None:
    network = Transformer(Shape(16, 2, 8), 1, VOCABULARY, positions.Learned)
    tokens = torch.zeros(1, 24, dtype=torch.int64)
    ids = torch.arange(24)[None] // 8
    assert network(tokens, documents=ids).isfinite().all()
    with pytest.raises(UserError, match="Learned has positions up to 7, got 11"):
        network(tokens, documents=torch.arange(24)[None] // 12)


@torch.no_grad()
def test_documents_that_cannot_be_used_are_refused() -> None:
    network, (tokens, ids) = network_of("RoPE"), documents()
    for wrong in (ids[:, 1:], ids.int(), ids[0]):
        with pytest.raises(UserError, match=r"^documents: got shape .*, expected .*\(3, 31\)"):
            network.losses(tokens, documents=wrong)
    cache_of_window = network.new_cache(window := Visibility(4, 2))
    for visibility, cache in ((Visibility(4, 2, "capped"), None), (window, cache_of_window)):
        with pytest.raises(UserError, match="documents: got documents with first_keys 2, expected 0"):
            network(tokens, visibility, cache=cache, documents=ids)
    network.bos = 1
    with pytest.raises(UserError, match="documents: got documents for a network that adds BOS, expected"):
        network(tokens, documents=ids)
