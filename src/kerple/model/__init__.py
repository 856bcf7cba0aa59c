"""The transformer: embedding, blocks, head, cache, generation, and cost."""

from kerple.model.batch import Batch
from kerple.model.transformer import Transformer

__all__ = ["Batch", "Transformer"]
