"""Exact match and token accuracy: one count per example, so that any grouping of them is a sum."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric


class Accuracy(NamedTuple):
    """What was found on a group of examples.

    Args:
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
    """Scored and right tokens of each example, summed over devices.

    Args:
        examples: Number of examples N; a batch says by index which of them it holds.
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
            predictions: (B, T) int64, the token chosen for each target.
            targets: (B, T) int64.
            scored: (B, T) bool, which targets count.
            index: (B,) int64, which example each row is; rows of index -1 are fillers and count nowhere.
        """
        real = index >= 0
        right = ((predictions == targets) & scored).sum(1)  # (B,)
        self.right.index_add_(0, index[real], right[real])
        self.asked.index_add_(0, index[real], scored.sum(1)[real])

    def compute(self) -> tuple[Tensor, Tensor]:
        """Right and scored tokens of each example, (N,) int64 each; 0 scored where an example was not seen."""
        return self.right, self.asked


def grouped(right: Tensor, asked: Tensor, keys: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Accuracy]:
    """Accuracy of each group of examples.

    Args:
        right: (N,) int64, right tokens of each example.
        asked: (N,) int64, its scored tokens; examples with 0 are left out.
        keys: N keys; examples with equal ones are a group.

    Returns:
        One entry for each key that has examples, keys ascending.
    """
    right, asked = right.reshape(-1), asked.reshape(-1)  # torchmetrics makes one example a scalar
    found = {}
    for key in sorted(set(keys)):
        members = torch.tensor([k == key for k in keys], device=asked.device) & (asked > 0)
        examples, targets = int(members.sum()), int(asked[members].sum())
        if examples:
            exact = int((right == asked)[members].sum())
            found[key] = Accuracy(exact / examples, int(right[members].sum()) / targets, examples, targets)
    return found
