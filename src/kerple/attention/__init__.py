"""Causal attention with a table of distances: one door, several ways of doing the same sum."""

from kerple.attention.choice import Asked
from kerple.attention.door import attend

__all__ = ["Asked", "attend"]
