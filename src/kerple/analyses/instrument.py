"""Run a network without torch.compile, so that forward hooks are called."""

from collections.abc import Iterator
from contextlib import contextmanager

from kerple.model import Transformer
from kerple.model.transformer import run_block


@contextmanager
def uncompiled(network: Transformer) -> Iterator[None]:
    """Within this context the network runs without its compiled graphs, which would not call hooks."""
    compiled, network.run_block = network.run_block, run_block
    try:
        yield
    finally:
        network.run_block = compiled
