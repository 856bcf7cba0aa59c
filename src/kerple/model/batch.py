"""The type of batches that data modules give to models."""

from torch import Tensor

Batch = dict[str, Tensor]
"""``tokens`` (B, T + 1) int64: each but the last is an input, each but the first a target. Where only some targets
count, ``scored`` (B, T) bool. Blocks of evaluation come with ``index`` (B,) int64, their numbers, -1 for a row that
only fills the batch; problems of a task with ``sizes`` (B, axes) int64, what the task counts."""
