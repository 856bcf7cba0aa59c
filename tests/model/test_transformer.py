"""The decoder: initialisation, dropout, cache, limits of positions, compilation, losses and options."""

import copy
import math
from functools import partial
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from kerple.base.errors import UserError
from kerple.model import Transformer, transformer
from kerple.model.cost import stored_for_backward
from kerple.model.loss import ChunkSizes, target_losses
from kerple.positions import KerpleLog, LayerPattern, Learned, NoPE, RoPE, Shape


def test_initial_weights_have_the_standard_deviations_of_gpt_2() -> None:
    network = Transformer(Shape(128, 4, 64), 8, 1000, NoPE, init=0.125)
    block = network.blocks[3]
    for weight in (network.embedding.weight, network.head.weight, block.attention.qkv.weight, block.mlp[0].weight):
        assert weight.std().item() == pytest.approx(0.125, rel=0.05)
    for weight in (block.attention.out.weight, block.mlp[-1].weight):
        assert weight.std().item() == pytest.approx(0.125 / math.sqrt(16), rel=0.05)
    assert not block.attention.qkv.bias.any()


def test_a_second_derivative_of_losses_is_an_error_and_not_wrong() -> None:
    network = Transformer(Shape(16, 2, 8), 1, 20, NoPE)
    with pytest.raises(UserError, match="create_graph: got True, expected False: losses have no second derivatives"):
        torch.autograd.grad(network.losses(torch.arange(9)[None]).mean(), network.head.weight, create_graph=True)


def test_dropout_drops_embeddings_and_both_outputs_of_a_block_only_in_training() -> None:
    network, calls = Transformer(Shape(64, 2, 8), 1, 20, NoPE, dropout=0.25), []
    for module in network.modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda _, arguments, out: calls.append((*arguments, out)))
    tokens = torch.randint(20, (32, 8))
    network(tokens)
    assert len(calls) == 3
    for before, after in calls:
        kept = after != 0
        assert kept.float().mean().item() == pytest.approx(0.75, abs=0.02)
        torch.testing.assert_close(after[kept], before[kept] / 0.75)
    assert torch.equal(network.eval()(tokens), network(tokens))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("dropout", 1.0),
        ("hidden", 0),
        ("init", 0.0),
        ("logit_cap", 0.0),
        ("norm", "batch"),
        ("kv_heads", 3),
        ("attention", "refrence"),
        ("qk_norm", "al"),
    ],
)
def test_errors_name_an_option_as_on_the_command_line(option: str, value: object) -> None:
    with pytest.raises(UserError, match=f"^model.{option}: got {value}, expected"):
        Transformer(Shape(8, 2, 4), 1, 10, NoPE, **{option: value})


def test_a_windowed_layers_cache_keeps_its_window() -> None:
    network = Transformer(Shape(16, 2, 8), 4, 20, partial(LayerPattern, windows={"local": 3}), kv_heads=1).eval()
    cache = network.new_cache()
    for _ in range(3):
        network(torch.zeros(1, 4, dtype=torch.long), cache=cache)
    assert [layer.keys.shape for layer in cache.layers] == [(1, 1, 3, 8), (1, 1, 12, 8)] * 2
    assert cache.length == 12


@pytest.mark.parametrize("position", [RoPE, partial(LayerPattern, windows={"local": 3})])
@torch.no_grad()
def test_a_failed_call_leaves_the_cache_as_it_was(position, monkeypatch) -> None:
    network, tokens = Transformer(Shape(32, 4, 16), 4, 50, position, init=0.3).eval(), torch.randint(50, (2, 30))
    cache = network.new_cache()
    network(tokens[:, :20], cache=cache)
    with pytest.raises(IndexError):
        network(torch.full((2, 3), 50), cache=cache)
    with monkeypatch.context() as patch:
        patch.setattr(network.blocks[2], "forward", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            network(tokens[:, :3], cache=cache)
    torch.testing.assert_close(network(tokens[:, 20:], cache=cache), network(tokens)[:, 20:], atol=1e-4, rtol=1e-4)


def test_a_position_beyond_the_last_of_a_strategy_is_refused() -> None:
    network, tokens = Transformer(Shape(8, 2, 10), 1, 20, Learned), torch.zeros(1, 6, dtype=torch.long)
    cache = network.new_cache()
    network(tokens, offset=4, cache=cache)
    for arguments in ({"offset": 5}, {"cache": cache}):
        with pytest.raises(ValueError, match=r"^model\.position: Learned has positions up to 9, got 1\d; use"):
            network(tokens, **arguments)
    with pytest.raises(
        UserError, match=r"^offset: got -1, expected 0 or more, because Learned has a table of positions"
    ):
        network(tokens, offset=-1)


def test_blocks_share_a_graph_and_a_compiled_network_raises_at_the_limit_of_graphs(monkeypatch) -> None:
    monkeypatch.setattr(transformer, "GRAPHS", 2)
    network, counter = Transformer(Shape(32, 4, 16), 3, 50, KerpleLog), CompileCounter()
    torch._dynamo.reset()
    uncompiled = copy.deepcopy(network)
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=False, optimize_ddp=True):
        network.compile(backend=counter)
        for graphs, length in ((1, 8), (2, 9)):
            tokens = torch.arange(2 * length).view(2, length)
            torch.testing.assert_close(network.features(tokens), uncompiled.features(tokens))
            assert counter.frame_count == graphs
        with pytest.raises(Exception, match="recompile_limit"):
            network.features(torch.zeros(1, 10, dtype=torch.int64))
    torch._dynamo.reset()


def losses_and_gradients(network: Transformer, autocast: bool = False, documents: torch.Tensor | None = None) -> list:
    network.zero_grad()
    torch.manual_seed(1)  # of dropout and random positions
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        losses = network.losses(torch.arange(82).view(2, 41) % 50, documents=documents)
    losses.mean().backward()
    return [losses.detach(), *(p.grad.clone() for p in network.parameters())]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("documents", [None, (torch.arange(82).view(2, 41) // 15)])
@pytest.mark.parametrize("name", ["RandomizedPositions", "PoPE", "KerpleLog"])
def test_activation_checkpointing_keeps_losses_gradients_and_the_random_state(
    tiny_network, name: str, documents: torch.Tensor | None, autocast: bool
) -> None:
    network, results = tiny_network(name).train(), []
    for module in network.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.2
    for network.checkpoint_activations in (False, True):
        results.append([*losses_and_gradients(network, autocast, documents), torch.rand(3)])
    assert all(map(torch.equal, *results))


def test_activation_checkpointing_stores_the_inputs_of_blocks() -> None:
    """The tensors that autograd keeps after a forward pass grow by one input (B, T, D) for each layer."""
    sizes = []
    for layers in (1, 4):
        network = Transformer(Shape(32, 4, 40), layers, 50, KerpleLog)
        network.checkpoint_activations = True
        with stored_for_backward({p.untyped_storage()._cdata for p in network.parameters()}) as stored:
            network.losses(torch.zeros(2, 41, dtype=torch.int64))
        sizes.append(sum(storage.nbytes() for storage in stored))
    assert sizes[1] - sizes[0] == 3 * 2 * 40 * 32 * 4


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_activation_checkpointing_keeps_the_gradients_of_compiled_blocks(tiny_network, backend: str) -> None:
    network, results = tiny_network("KerpleLog"), []
    torch.compiler.reset()
    network.compile(backend=backend)
    for network.checkpoint_activations in (False, True):
        results.append(losses_and_gradients(network))
    torch.compiler.reset()
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("cap", [None, 0.1])
@pytest.mark.parametrize("autocast", [False, True])
def test_losses_are_the_cross_entropy_of_the_logits_in_fp32(tiny_network, autocast: bool, cap: float | None) -> None:
    network, tokens = tiny_network("RoPE"), torch.randint(0, 50, (3, 13))
    network.logit_cap = cap
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        losses, last = network.losses(tokens), network.losses(tokens, last=5)
        logits = network(tokens[:, :-1])  # rounded to bf16 under autocast, as the logits inside ``losses``
    assert losses.dtype == torch.float32
    expected = F.cross_entropy(logits.double().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(3, 12)
    torch.testing.assert_close(losses, expected.float())
    torch.testing.assert_close(last, losses[:, -5:])


@pytest.mark.parametrize("stored", [0, 10**6])
def test_losses_in_chunks_have_the_values_and_gradients_of_cross_entropy(stored: int) -> None:
    head = torch.nn.Linear(8, 11, bias=False).double()
    features = torch.randn(29, 8, dtype=torch.double, requires_grad=True)
    targets, results = torch.randint(0, 11, (29,)), []
    for losses in (
        F.cross_entropy(head(features), targets, reduction="none"),
        target_losses(head, features, targets, sizes=ChunkSizes(4 * 11, stored, rows=1)),
    ):
        results.append([losses, *torch.autograd.grad(losses.sum(), (features, head.weight))])
    torch.testing.assert_close(results[1], results[0], atol=1e-12, rtol=1e-12)


@pytest.mark.slow
def test_gradients_of_a_compiled_network_are_sent_during_the_backward_pass(tmp_path) -> None:
    def send(_, bucket):
        events.append("bucket")
        return allreduce_hook(None, bucket)

    network, events = Transformer(Shape(32, 4, 16), 3, 50, NoPE), []
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/processes", rank=0, world_size=1)
    try:
        network.compile(backend="aot_eager")
        parallel = DistributedDataParallel(network, bucket_cap_mb=0.01, find_unused_parameters=True)
        parallel.register_comm_hook(None, send)
        network.embedding.weight.register_hook(lambda _: events.append("embedding"))
        parallel(torch.arange(34).view(2, 17)).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
        torch._dynamo.reset()
    assert events.count("bucket") > 3
    assert events.index("embedding") >= events.count("bucket") - 1  # only the bucket of the embedding is sent later
