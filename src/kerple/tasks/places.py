"""Places of tokens, as strategies are told of them: tokens that belong together get one number.

All are causal functions of the tokens (B, T) int64, so that generation needs nothing else: the place of a token depends
on it and on those before it. They return (B, T) int64, 0 for a token that has no place.
"""

import torch
from torch import Tensor

from kerple.tasks.vocabulary import IDS, PAD_ID

DIGIT_IDS = range(IDS["0"], IDS["9"] + 1)
LETTER_IDS = range(IDS["a"], IDS["Z"] + 1)


def inside(tokens: Tensor, ids: range) -> Tensor:
    """Which tokens are of these ids; (B, T) bool."""
    return (tokens >= ids.start) & (tokens < ids.stop)


def counted(tokens: Tensor, ids: range) -> Tensor:
    """1 for each token of these ids that follows another token, 2 for the one after it, and so on; 0 for others."""
    rows = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    before = rows.where(~inside(tokens, ids), -1).cummax(1).values  # the last other token
    return rows - before


def abacus(tokens: Tensor) -> Tensor:
    """The i-th digit of every number, from its start, is at i (McLeish et al. 2024, arXiv 2405.17399, section 3.1)."""
    return counted(tokens, DIGIT_IDS)


def in_step(tokens: Tensor, ids: range) -> Tensor:
    """The i-th symbol of every run is at i + 1, the token before the run at 1: each says where the next one is.

    Of numbers written last digit first, digits of one significance share a place, and what is written at one place
    depends on those at the next (Cho et al. 2024, arXiv 2405.20671, section 4).
    """
    return (counted(tokens, ids) + 1).where(tokens != PAD_ID, 0)


def mirrored(tokens: Tensor, ids: range) -> Tensor:
    """As `in_step` before the first =; from there on they count down again: the i-th symbol behind it is at the place
    of the i-th last before it."""
    rows = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    equals = tokens == IDS["="]
    turn = equals.int().argmax(1, keepdim=True)  # (B, 1)
    back = (turn + 1 - (rows - turn)).clamp(min=1)
    return in_step(tokens, ids).where(equals.cumsum(1) == 0, back).where(tokens != PAD_ID, 0)
