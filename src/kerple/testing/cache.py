"""Properties of reading token by token with a cache."""

import torch

from kerple.testing.subject import DoesNotApply, Subject, holds, same, tokens


@holds
@torch.no_grad()
def reading_token_by_token_gives_what_reading_at_once_does(subject: Subject) -> None:
    """9 of 14 tokens at once, then one by one through the cache, with as many key heads as heads and with half."""
    for kv_heads in (None, 2):
        network, given = subject.network(kv_heads=kv_heads), tokens(2, 14)
        if not network.prefix_consistent:
            raise DoesNotApply("it is not prefix_consistent")
        cache = network.new_cache()
        pieces = [network(piece, cache=cache) for piece in (given[:, :9], *given[:, 9:].split(1, 1))]
        same(torch.cat(pieces, 1), network(given), "logits from a cache")


@holds
@torch.no_grad()
def a_windowed_cache_keeps_its_window_and_loses_nothing(subject: Subject) -> None:
    """A cache for a window of 5 holds at most 5 keys, and gives the logits of reading 24 tokens at once."""
    network, given = subject.network(), tokens(2, 24)
    if not network.prefix_consistent:
        raise DoesNotApply("it is not prefix_consistent")
    cache = network.new_cache(window=5)
    pieces = [network(p, window=5, cache=cache) for p in (given[:, :9], given[:, 9:13], *given[:, 13:].split(1, 1))]
    same(torch.cat(pieces, 1), network(given, window=5), "logits from a cache of 5 keys")
    for layer in cache.layers:
        assert layer.keys is not None
        assert layer.keys.shape[2] <= 5, f"a cache for a window of 5 keys keeps {layer.keys.shape[2]}"
