"""Causal attention with a table of distances: one function, `attend`, with several implementations."""

from kerple.attention.choice import Asked
from kerple.attention.door import attend

__all__ = ["Asked", "attend"]
