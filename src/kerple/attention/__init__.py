"""Causal attention with the modifications of a positional strategy.

`attend` selects one of several implementations (`kerple.attention.backend_selection`) and calls it. `AttentionSpec`
lists the modifications, such as a table of attention biases by distance, a window, or a function that computes new
scores.
"""

from kerple.attention.backend_selection import AttentionOption
from kerple.attention.dispatch import attend
from kerple.attention.spec import AttentionSpec

__all__ = ["AttentionOption", "AttentionSpec", "attend"]
