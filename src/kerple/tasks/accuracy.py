"""Exact match and token accuracy. Counts are kept for each example, so that those of any group are sums."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric


class Accuracy(NamedTuple):
    """Accuracy on a group of examples.

    Attributes:
        exact_match: Share of examples with every scored token right.
        token_accuracy: Share of scored tokens that are right.
        examples: Number of examples.
        targets: Number of scored tokens.
    """

    exact_match: float
    token_accuracy: float
    examples: int
    targets: int


class AnswerAccuracy(Metric):
    """Counts the scored and the right tokens of each example, and adds them over devices.

    Args:
        examples: Number of examples N.
    """

    full_state_update = False
    higher_is_better = True
    right: Tensor
    asked: Tensor

    def __init__(self, examples: int) -> None:
        super().__init__()
        for state in ("right", "asked"):
            self.add_state(state, torch.zeros(examples, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, predictions: Tensor, targets: Tensor, scored: Tensor, index: Tensor) -> None:
        """Count a batch.

        Args:
            predictions: The token predicted for each target, (B, T) int64.
            targets: The targets, (B, T) int64.
            scored: Whether each target counts, (B, T) bool.
            index: Number of the example in each row, (B,) int64; -1 for fillers, which do not count.
        """
        real = index >= 0
        right = ((predictions == targets) & scored).sum(1)  # (B,)
        self.right.index_add_(0, index[real], right[real])
        self.asked.index_add_(0, index[real], scored.sum(1)[real])

    def compute(self) -> tuple[Tensor, Tensor]:
        """Numbers of right and of scored tokens of each example, both (N,) int64; 0 for examples that were not seen."""
        return self.right, self.asked


def grouped(right: Tensor, asked: Tensor, keys: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Accuracy]:
    """Accuracy of each group of examples.

    Args:
        right: Number of right tokens of each example, (N,) int64.
        asked: Number of scored tokens of each example, (N,) int64; an example with 0 is left out.
        keys: N keys, one for each example; examples with equal keys are a group.

    Returns:
        The accuracy of each key that has examples, in ascending order of the keys.
    """
    right, asked = right.reshape(-1), asked.reshape(-1)  # torchmetrics returns a scalar for a single example
    found = {}
    for key in sorted(set(keys)):
        members = torch.tensor([k == key for k in keys], device=asked.device) & (asked > 0)
        examples, targets = int(members.sum()), int(asked[members].sum())
        if examples:
            exact = int((right == asked)[members].sum())
            found[key] = Accuracy(exact / examples, int(right[members].sum()) / targets, examples, targets)
    return found
