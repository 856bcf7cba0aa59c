"""The transformer, its options, loss, cache and generation of text, and estimates of its cost."""

from kerple.model.batch_type import Batch
from kerple.model.transformer import Transformer

__all__ = ["Batch", "Transformer"]
