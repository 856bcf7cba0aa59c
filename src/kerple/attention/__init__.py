"""Causal attention with what a strategy adds: one function, `attend`, with several implementations.

A strategy can add a table of biases by distance (H, T), a weight by distance, a window, a sink, a change of the scores
(mix) and vectors added to the values.
"""

from kerple.attention.backend import AttentionOption
from kerple.attention.dispatch import attend

__all__ = ["AttentionOption", "attend"]
