"""Places of tokens. The strategies `Coupled` and `Abacus` have a learned vector for each place.

Tokens that belong together, such as digits of equal significance, have the same place. The functions map tokens (B, T)
int64, which are B sequences of T token ids, to places (B, T) int64, 0 for tokens without a place. The place of a token
must not depend on later tokens, because they do not exist yet during generation.
"""

import torch
from torch import Tensor

from kerple.tasks.vocabulary import BEGIN_ID, END_ID, IDS, PAD_ID

DIGIT_IDS = range(IDS["0"], IDS["9"] + 1)
LETTER_IDS = range(IDS["a"], IDS["Z"] + 1)


def index_in_run(tokens: Tensor, ids: range) -> Tensor:
    """Return the index, from 1, of each token in its run of consecutive tokens with these ids; 0 for other tokens."""
    indices = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    is_other = (tokens < ids.start) | (tokens >= ids.stop)
    last_other = indices.where(is_other, -1).cummax(1).values  # index of the last token with another id
    return indices - last_other


def abacus(tokens: Tensor) -> Tensor:
    """Return place i for the i-th digit of each number (McLeish et al. 2024, arXiv 2405.17399, section 3.1)."""
    return index_in_run(tokens, DIGIT_IDS)


def is_text(tokens: Tensor) -> Tensor:
    """Return whether each token is neither the begin token nor the end token nor padding, (B, T) bool."""
    return (tokens != BEGIN_ID) & (tokens != END_ID) & (tokens != PAD_ID)


def aligned_places(tokens: Tensor, ids: range) -> Tensor:
    """Return place i + 1 for the i-th token of every run of tokens with these ids, and 1 for others, such as ``=``.

    If numbers are written with the last digit first, digits of equal significance have the same place (Cho et al. 2024,
    arXiv 2405.20671, section 4). Begin, end and padding have no place. Let p be the place of the last token
    that the model has read. To write the next digit, the model can attend to the digits with place p + 1. If a number
    has no such digit, the model can attend to the begin token instead, which then represents the missing digit.
    """
    return (index_in_run(tokens, ids) + 1).where(is_text(tokens), 0)


def mirrored(tokens: Tensor, ids: range) -> Tensor:
    """Return `aligned_places` before the first ``=``, and descending places of at least 1 from this ``=`` on.

    If one run precedes the ``=``, the i-th token after the ``=`` has the place of the i-th last token of the run.
    """
    indices = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    equals = tokens == IDS["="]
    first_equals = equals.int().argmax(1, keepdim=True)  # (B, 1)
    descending = (first_equals + 1 - (indices - first_equals)).clamp(min=1)
    return aligned_places(tokens, ids).where(equals.cumsum(1) == 0, descending).where(is_text(tokens), 0)
