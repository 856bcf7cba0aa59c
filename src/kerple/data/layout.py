"""`ShardLayout`: names, sizes and offsets of shards, which are functions of a few numbers."""

from dataclasses import dataclass
from typing import Any

import numpy as np

RUN_TOKENS = 1 << 20  # tokens per tar member: 1 Mi-token members read at 670 Mtok/s, 513-token members at 10
RUNS_PER_SHARD = 64  # 128 MiB of uint16
TAR_BLOCK = 512  # bytes; tar pads to a multiple of it


@dataclass(frozen=True)
class ShardLayout:
    """Names, sizes and offsets of shards, which follow from the dtype and two sizes.

    Args:
        dtype: "uint16" for vocabularies of up to 65,536 entries, "uint32" for larger ones; both are little-endian.
        run_tokens: Tokens in a tar member (a run), R; the last run of a split holds the rest.
        runs_per_shard: Members in a tar file (a shard).
    """

    dtype: str
    run_tokens: int = RUN_TOKENS
    runs_per_shard: int = RUNS_PER_SHARD

    @property
    def numpy(self) -> np.dtype[Any]:
        """The little-endian dtype of token ids."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def run_bytes(self) -> int:
        """Bytes that a full member takes in the tar file: header, token ids and padding."""
        return TAR_BLOCK + -(-self.run_tokens * self.numpy.itemsize // TAR_BLOCK) * TAR_BLOCK

    def member(self, split: str, run: int) -> str:
        """Name of the tar member that holds a run."""
        return f"{split}-{run:08d}.{'u16' if self.numpy.itemsize == 2 else 'u32'}"

    def shard(self, split: str, shard: int) -> str:
        """Name of the tar file of a shard."""
        return f"{split}-{shard:05d}.tar"

    def runs(self, tokens: int) -> int:
        """Number of runs of a split of `tokens` tokens."""
        return -(-tokens // self.run_tokens)

    def shards(self, tokens: int) -> int:
        """Number of shards of a split of `tokens` tokens."""
        return -(-tokens // (self.run_tokens * self.runs_per_shard))

    def tokens_in_run(self, tokens: int, run: int) -> int:
        """Number of tokens in a run of a split of `tokens` tokens."""
        return min(self.run_tokens, tokens - run * self.run_tokens)

    def shard_bytes(self, tokens: int, shard: int) -> int:
        """Bytes of a finished tar file of a split of `tokens` tokens: its members and two blocks of zeros."""
        own = min(tokens - shard * self.runs_per_shard * self.run_tokens, self.runs_per_shard * self.run_tokens)
        full, rest = divmod(own, self.run_tokens)
        last = TAR_BLOCK + -(-rest * self.numpy.itemsize // TAR_BLOCK) * TAR_BLOCK if rest else 0
        return full * self.run_bytes + last + 2 * TAR_BLOCK
