"""Text data: tokenizers, shards (files of token ids), the order of samples, and loaders.

`kerple.data.prepare` writes the shards. `TokenShards` is imported on first use, because it needs torch, which the
preparation and the inspection of shards do not need.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kerple.data.datamodule import TokenShards

__all__ = ["TokenShards"]


def __getattr__(name: str) -> Any:
    if name == "TokenShards":
        from kerple.data.datamodule import TokenShards

        return TokenShards
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
