"""The transformer with its options, loss, cache and text generation, and estimates of its cost."""

from kerple.model.network import Batch
from kerple.model.transformer import Transformer

__all__ = ["Batch", "Transformer"]
