"""`Visibility`: the keys that a query sees, and their distances."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from kerple.base.errors import require

Distances = Literal["true", "capped", "cache"]


@dataclass(frozen=True)
class Visibility:
    """Keys that a query sees. By default these are all keys up to its own.

    Args:
        window: Number of last keys that a query sees, including its own; None for all.
        first_keys: Number of first tokens of the input that every query sees in addition to its window.
        distances: Distances of first tokens outside the window. ``true``: the true distances, so that the window
            changes only the mask. ``capped``: all equal to ``window`` (LM-Infinite, Han et al. 2024, arXiv 2308.16137).
            ``cache``: positions count only visible keys (StreamingLLM, Xiao et al. 2024, arXiv 2309.17453). The
            distance from token m back to token j < ``first_keys`` is then ``min(m, first_keys + window - 1) - j``.

    Raises:
        UserError: If a number is out of range. If ``capped`` or ``cache`` is given without a window or without
            ``first_keys``.
    """

    window: int | None = None
    first_keys: int = 0
    distances: Distances = "true"

    def __post_init__(self) -> None:
        window, first_keys, distances = self.window, self.first_keys, self.distances
        require(window is None or window >= 1, "window", window, "at least 1 key, the query's own, or none for all")
        require(first_keys >= 0, "first_keys", first_keys, "0 or more first tokens")
        require(distances in get_args(Distances), "distances", distances, "true, capped or cache")
        given = f"{distances} with window {window} and first_keys {first_keys}"
        expected = "true; other distances need `window` and `first_keys`"
        require(distances == "true" or bool(window and first_keys), "distances", given, expected)

    def narrow(self, window: int | None) -> "Visibility":
        """Return ``Visibility(window)`` if a layer's ``window`` is at most ``self.window``, else ``self``."""
        layer_window_is_narrower = window is not None and (self.window is None or window <= self.window)
        return Visibility(window) if layer_window_is_narrower else self

    def with_bos(self) -> "Visibility":
        """Return this visibility for an input with an additional first token, which every query sees (see `narrow`)."""
        return self if self.window is None else replace(self, first_keys=self.first_keys + 1)


EVERYTHING = Visibility()
"""All keys up to the query's own, at their true distances."""
