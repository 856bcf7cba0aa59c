"""Causal attention with what a strategy changes: one function, `attend`, with several implementations.

A strategy can add a table of biases by distance (H, T), a weight by distance, a window, a sink, a change of the scores
and vectors added to the output: `AttentionSpec`.
"""

from kerple.attention.backend import AttentionOption
from kerple.attention.dispatch import attend
from kerple.attention.spec import AttentionSpec

__all__ = ["AttentionOption", "AttentionSpec", "attend"]
