"""Sums and counts: what a perplexity is made of, and the ways it goes wrong elsewhere."""

import math

import pytest
import torch

from kerple.evaluation.metrics import TokenLoss


def test_perplexity_is_one_exp_of_one_quotient_not_a_mean_of_means() -> None:
    metric = TokenLoss()
    metric.update(torch.tensor([6.0, 4.0]), 0, torch.tensor([3, 0]))  # windows of unequal size
    metric.update(torch.ones(6), 0, torch.tensor([1, 2, 3, 4, 5, 6]))
    assert float(metric.compute()) == pytest.approx(math.exp(16 / 8), rel=1e-12)
    assert float(metric.bits_per_byte()) == pytest.approx(16 / math.log(2) / 24, rel=1e-12)


def test_sums_are_fp64_and_counts_are_integers() -> None:
    metric = TokenLoss()
    metric.update(torch.tensor([2.0**25]), 0)
    metric.update(torch.tensor([1.0]), 0)
    assert (metric.nll.dtype, metric.targets.dtype) == (torch.float64, torch.int64)
    assert float(metric.nll) == 2.0**25 + 1  # lost in an fp32 sum
    losses, many = torch.full((3, 2**20), 7.1), TokenLoss()  # an fp32 sum of these is wrong in the fourth digit
    many.update(losses, 0)
    assert float(many.nll) == pytest.approx(losses.numel() * float(losses[0, 0]), rel=1e-14)
    assert int(many.targets) == losses.numel()


def test_columns_are_groups_without_a_group() -> None:
    metric = TokenLoss(groups=2)
    losses = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]])  # (2, 2, 2)
    metric.update(losses, bytes=losses.long() * 10)
    metric.update(torch.tensor([1.0, 1.0]))
    assert metric.nll.tolist() == [17.0, 21.0]
    assert metric.targets.tolist() == [5, 5]
    assert metric.bytes.tolist() == [160, 200]
