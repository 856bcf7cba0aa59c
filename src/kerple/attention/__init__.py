"""Causal attention that a positional strategy can modify: one function, `attend`, with several implementations.

`AttentionSpec` lists the modifications: a table of attention biases by distance (H, T), factors by distance, a window,
a sink, new scores, and additions to the output.
"""

from kerple.attention.backend import AttentionOption
from kerple.attention.dispatch import attend
from kerple.attention.spec import AttentionSpec

__all__ = ["AttentionOption", "AttentionSpec", "attend"]
