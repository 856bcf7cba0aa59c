"""Run a network without torch.compile, so that forward hooks are called."""

from collections.abc import Iterator
from contextlib import contextmanager

from kerple.model import Transformer


@contextmanager
def uncompiled(network: Transformer) -> Iterator[None]:
    """Within this context the network runs without its compiled graph, which would not call hooks."""
    compiled = network.__dict__.pop("features", None)
    try:
        yield
    finally:
        if compiled is not None:
            network.features = compiled  # type: ignore[method-assign]
