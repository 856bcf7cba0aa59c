"""Places of tokens, which `Coupled` and `Abacus` embed: tokens that belong together have the same place.

The functions map tokens (B, T) int64 to places (B, T) int64, 0 for tokens without a place. The place of a token must
not depend on later tokens, which do not exist during generation.
"""

import torch
from torch import Tensor

from kerple.tasks.vocabulary import BEGIN_ID, END_ID, IDS, PAD_ID

DIGIT_IDS = range(IDS["0"], IDS["9"] + 1)
LETTER_IDS = range(IDS["a"], IDS["Z"] + 1)


def is_among(tokens: Tensor, ids: range) -> Tensor:
    """Return whether each token is one of these ids, (B, T) bool."""
    return (tokens >= ids.start) & (tokens < ids.stop)


def index_in_run(tokens: Tensor, ids: range) -> Tensor:
    """Return the index, from 1, of each token in its run of consecutive tokens with these ids; 0 for other tokens."""
    rows = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    boundary = rows.where(~is_among(tokens, ids), -1).cummax(1).values  # index of the last token of another id
    return rows - boundary


def abacus(tokens: Tensor) -> Tensor:
    """Return place i for the i-th digit of each number (McLeish et al. 2024, arXiv 2405.17399, section 3.1)."""
    return index_in_run(tokens, DIGIT_IDS)


def is_text(tokens: Tensor) -> Tensor:
    """Return which tokens are neither begin, nor end, nor padding, (B, T) bool."""
    return (tokens != BEGIN_ID) & (tokens != END_ID) & (tokens != PAD_ID)


def in_step(tokens: Tensor, ids: range) -> Tensor:
    """Return place i + 1 for the i-th symbol of every run of symbols of these ids, and 1 for others, such as ``=``.

    In numbers that are written with the last digit first, digits of equal significance then have the same place (Cho et
    al. 2024, arXiv 2405.20671, section 4). Begin and end have no place. After the last digit no symbol has the next
    place, and a query can attend to the begin token instead.
    """
    return (index_in_run(tokens, ids) + 1).where(is_text(tokens), 0)


def mirrored(tokens: Tensor, ids: range) -> Tensor:
    """Return the places of `in_step` up to the first ``=``, and descending places from there on.

    The i-th symbol after the ``=`` then has the place of the i-th last symbol before it.
    """
    rows = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    equals = tokens == IDS["="]
    first_equals = equals.int().argmax(1, keepdim=True)  # (B, 1)
    descending = (first_equals + 1 - (rows - first_equals)).clamp(min=1)
    return in_step(tokens, ids).where(equals.cumsum(1) == 0, descending).where(is_text(tokens), 0)
