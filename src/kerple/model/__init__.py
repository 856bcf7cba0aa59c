"""The transformer: embedding, blocks, head."""

from kerple.model.transformer import Transformer

__all__ = ["Transformer"]
