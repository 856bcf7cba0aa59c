"""Text to batches: corpora, tokenizers, shards, the order of samples, loaders.

Only the names below are public here; they are imported on first use, because the processes that tokenise import this
package too and have no use for torch.
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
