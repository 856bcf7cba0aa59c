"""Causal attention with a table of distances: one door, several ways of doing the same sum."""

from kerple.attention.reference import attend_reference as attend

__all__ = ["attend"]
