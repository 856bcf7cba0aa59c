"""Looking inside a network that may be compiled."""

from collections.abc import Iterator
from contextlib import contextmanager

from kerple.model import Transformer


@contextmanager
def uncompiled(network: Transformer) -> Iterator[None]:
    """The network as it was before `Transformer.compile`: a compiled graph does not call hooks."""
    compiled = network.__dict__.pop("features", None)
    try:
        yield
    finally:
        if compiled is not None:
            network.features = compiled  # type: ignore[method-assign]
