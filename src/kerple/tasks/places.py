"""Places of tokens, which `Coupled` and `Abacus` embed: tokens that belong together have the same number.

The functions take tokens (B, T) int64 and return places (B, T) int64, 0 for a token without one. The place of a token
depends only on the token and those before it, because later ones do not exist yet when a model generates.
"""

import torch
from torch import Tensor

from kerple.tasks.vocabulary import BEGIN_ID, END_ID, IDS, PAD_ID

DIGIT_IDS = range(IDS["0"], IDS["9"] + 1)
LETTER_IDS = range(IDS["a"], IDS["Z"] + 1)


def inside(tokens: Tensor, ids: range) -> Tensor:
    """Whether each token is one of these ids; (B, T) bool."""
    return (tokens >= ids.start) & (tokens < ids.stop)


def number_in_run(tokens: Tensor, ids: range) -> Tensor:
    """Number of each token in its run of consecutive tokens of these ids, from 1; 0 for other tokens."""
    rows = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    boundary = rows.where(~inside(tokens, ids), -1).cummax(1).values  # index of the last token of another id
    return rows - boundary


def abacus(tokens: Tensor) -> Tensor:
    """Place i for the i-th digit of a number from its start (McLeish et al. 2024, arXiv 2405.17399, section 3.1)."""
    return number_in_run(tokens, DIGIT_IDS)


def is_text(tokens: Tensor) -> Tensor:
    """Which tokens are neither begin, nor end, nor padding; (B, T) bool."""
    return (tokens != BEGIN_ID) & (tokens != END_ID) & (tokens != PAD_ID)


def in_step(tokens: Tensor, ids: range) -> Tensor:
    """Place i + 1 for the i-th symbol of every run of symbols of these ids, and 1 for other tokens, such as ``=``.

    The token to be written next then has the place after that of the token it follows. In numbers that are written with
    the last digit first, digits of one significance have the same place (Cho et al. 2024, arXiv 2405.20671, section 4).
    Begin and end have none. After the last digit, where no symbol has the place that attention looks for, it can go to
    the begin token, which is the same for every place.
    """
    return (number_in_run(tokens, ids) + 1).where(is_text(tokens), 0)


def mirrored(tokens: Tensor, ids: range) -> Tensor:
    """The places of `in_step` up to the first ``=``, from which on they count down.

    The i-th symbol after the ``=`` then has the place of the i-th last symbol before it.
    """
    rows = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    equals = tokens == IDS["="]
    turn = equals.int().argmax(1, keepdim=True)  # (B, 1)
    back = (turn + 1 - (rows - turn)).clamp(min=1)
    return in_step(tokens, ids).where(equals.cumsum(1) == 0, back).where(is_text(tokens), 0)
