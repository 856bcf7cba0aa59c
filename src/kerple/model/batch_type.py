"""`Batch`: the type of the batches from data modules."""

from torch import Tensor

Batch = dict[str, Tensor]
"""Tensors by name. Only ``tokens`` is always present.

- ``tokens`` (B, T + 1) int64: inputs are all tokens except the last, and targets are all tokens except the first.
- ``scored`` (B, T) bool: which targets contribute to the loss; without it all targets do.
- ``index`` (B,) int64: in evaluation, the index of each block of text or problem of a task; -1 for padding rows.
"""
