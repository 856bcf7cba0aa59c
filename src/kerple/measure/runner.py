"""`Runner`: device, precision and processes of a measurement."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from kerple.base.errors import UserError
from kerple.base.precision import choose_precision

if TYPE_CHECKING:
    from kerple.measure.metrics import TokenLoss

T = TypeVar("T")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Runner:
    """Device, precision and processes of a measurement; by default this process on the CPU in fp32.

    Args:
        device: Device of the network and the text.
        autocast: Function that returns the context of a forward pass.
        precision: Name of the precision in records, such as ``bf16-mixed``.
        rank: Number of this process.
        processes: Number of processes. With more than one, torch.distributed must be initialised.
        progress: Function that yields the items of a sequence and displays the progress.
    """

    device: torch.device = CPU
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    precision: str = "32-true"
    rank: int = 0
    processes: int = 1
    progress: Callable[[Sequence[Any]], Iterator[Any]] = iter

    def part(self, items: Sequence[T]) -> Iterator[tuple[int, T]]:
        """Yield the index and the item of every n-th item, where n is the number of processes."""
        for i in self.progress(range(self.rank, len(items), self.processes)):
            yield i, items[i]

    def blocks(self, blocks: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Yield the index and the tokens, (1, N + 1) int64 on the device, of each block of this process."""
        for i, tokens in self.part(blocks):
            yield i, tokens.to(self.device)[None]

    def losses(self, groups: int = 1) -> "TokenLoss":
        """Sums of losses by group, on the device."""
        from kerple.measure.metrics import TokenLoss  # torchmetrics takes 4 s of processor time to import

        return TokenLoss(groups).to(self.device)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of a tensor over all processes, on the CPU."""
        if self.processes > 1:
            torch.distributed.all_reduce(x)
        return x.cpu()

    def sum_losses(self, x: Tensor) -> Tensor:
        """As `sum`, for losses.

        Raises:
            UserError: If a sum is not finite.
        """
        x = self.sum(x)
        _check_finite(x)
        return x

    def synchronise(self, *losses: "TokenLoss") -> None:
        """Replace the sums of this process by the sums over all processes.

        Raises:
            UserError: If a sum is not finite.
        """
        for loss in losses:
            loss.sync()
            _check_finite(loss.nll)

    @classmethod
    def detect(cls, device: str | None = None, precision: str = "32-true") -> "Runner":
        """A runner outside Lightning. Under torchrun, the processes share the work.

        Args:
            device: Device; None for a GPU if there is one, else the CPU.
            precision: ``32-true``, ``bf16-mixed``, ``16-mixed``, or ``auto`` to choose by the device.

        Raises:
            UserError: If there is no such device or precision.
        """
        ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if kind == "cuda" and not torch.cuda.is_available():
            raise UserError("device: got cuda, but there is no CUDA device; expected cpu")
        place = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if kind == "cuda" else kind)
        if ranks > 1 and not torch.distributed.is_initialized():
            torch.distributed.init_process_group("nccl" if kind == "cuda" else "gloo")
        precision = choose_precision(kind)[0] if precision == "auto" else precision
        dtypes = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
        if precision not in dtypes:
            raise UserError(f"precision: got {precision}, expected one of auto, {', '.join(dtypes)}")
        dtype = dtypes[precision]
        autocast = nullcontext if dtype is None else partial(torch.autocast, place.type, dtype)
        return cls(place, autocast, precision, rank, ranks)


def _check_finite(sums: Tensor) -> None:
    if not sums.isfinite().all():
        raise UserError("model: the loss of the text is not finite; check the weights for NaN, or use another model")
