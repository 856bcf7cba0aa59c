"""Properties about the tokens on which logits may depend."""

import torch
from torch import Tensor, nn

from kerple.testing.subject import VOCABULARY, DoesNotApply, Subject, holds, same, tokens


@holds
def the_past_has_no_gradient_from_the_future(subject: Subject) -> None:
    """By autograd, the first 20 logits depend on their own and earlier embeddings, and not on later ones."""
    network, embedded = subject.network(), []

    def keep(module: nn.Module, arguments: tuple, x: Tensor) -> Tensor:
        embedded.append(x.detach().requires_grad_())
        return embedded[0]

    network.embedding.register_forward_hook(keep)
    logits = network(tokens(2, 30))
    weights = torch.randn(2, 20, VOCABULARY, generator=torch.Generator().manual_seed(0))
    (logits[:, :20] * weights).sum().backward()

    gradient = embedded[0].grad
    assert gradient is not None, "logits have no gradient"
    reached = gradient.abs().amax(-1)  # (2, 30)
    assert (reached[:, 20:] == 0).all(), "a token has a gradient from a later one"
    assert (reached[:, :20] > 0).all(), "a token has no gradient from itself or a later one"


@holds
@torch.no_grad()
def what_comes_later_changes_nothing(subject: Subject) -> None:
    """Later tokens change no logit; autograd cannot show this for positions that depend on tokens."""
    network, given = subject.network(), tokens(2, 30)
    changed = given.clone()
    changed[:, 20:] = (given[:, 20:] + 1) % VOCABULARY
    before, after = network(given), network(changed)

    same(after[:, :20], before[:, :20], "logits before a changed token")
    assert (after[:, 20:] - before[:, 20:]).abs().max() > 1e-3, "a changed token changes nothing"


@holds
@torch.no_grad()
def an_offset_changes_nothing_exactly_where_the_strategy_says_so(subject: Subject) -> None:
    """Logits of tokens moved by 500 positions are equal if ``shift_invariant`` is True, differ if it is False."""
    network = subject.network()
    invariant = network.positions[0].shift_invariant
    if invariant is None:
        raise DoesNotApply("shift_invariant is None")
    offset = subject.reach(524) - 24
    if offset < 1:
        raise DoesNotApply(f"max_length is {network.positions[0].max_length}")
    given = tokens(2, 24)
    moved = float((network(given, offset=offset) - network(given)).abs().max())

    assert not invariant or moved < 1e-4, f"shift_invariant, but an offset of {offset} moves logits by {moved:.3g}"
    assert invariant or moved > 1e-3, f"not shift_invariant, but an offset of {offset} moves logits by {moved:.3g} only"


@holds
@torch.no_grad()
def the_logits_of_a_prefix_are_the_prefix_of_the_logits(subject: Subject) -> None:
    """Within the training length, the logits of a prefix are the first logits of the whole input."""
    network, given = subject.network(), tokens(2, 30)
    if not network.prefix_consistent:
        raise DoesNotApply("it is not prefix_consistent")
    same(network(given)[:, :17], network(given[:, :17]), "logits of the first 17 of 30 tokens")


@holds
@torch.no_grad()
def a_window_hides_what_is_before_it_and_nothing_else(subject: Subject) -> None:
    """In two layers with a window of 4 keys, a change affects only the next 6 tokens; a window of all keys is none."""
    network, given = subject.network(), tokens(1, 30)
    changed = given.clone()
    changed[:, :10] = (given[:, :10] + 1) % VOCABULARY
    own = min((p.window for p in network.positions if p.window is not None), default=30)
    if own >= 30:
        same(network(given, window=30), network(given), "logits with a window of all keys")
    before, after = network(given, window=4), network(changed, window=4)

    # two layers of four keys reach six tokens back
    same(before[:, 16:], after[:, 16:], "logits out of reach of a changed token")
    assert (before[:, 10:15] - after[:, 10:15]).abs().max() > 1e-3, "a changed token within reach changes nothing"
    beyond = network(given[:, 9:], offset=subject.reach(39) - 30 if subject.reach(39) < 39 else 9, window=4)
    # else the same tokens at other rows, or in an input of another length, may be another matter
    if network.positions[0].shift_invariant and network.prefix_consistent:
        same(beyond[:, 6:], before[:, 15:], "logits without the tokens that no window reaches", atol=1e-4)
