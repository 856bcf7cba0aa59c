"""`Batch`: the type of the batches from data modules."""

from torch import Tensor

Batch = dict[str, Tensor]
"""Tensors by name.

- ``tokens`` (B, T + 1) int64: inputs are all tokens except the last, targets all tokens except the first.
- ``scored`` (B, T) bool: which targets count; missing if all do.
- ``index`` (B,) int64: numbers of blocks in evaluation, -1 for rows that only fill the batch.
- ``sizes`` (B, axes) int64: sizes of the problems of a task.
"""
