"""`Runner`: device, precision and processes of a measurement."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from kerple.base.errors import UserError, require
from kerple.config.auto_precision import choose_precision

if TYPE_CHECKING:
    from kerple.measure.loss_metrics import TokenLoss

T = TypeVar("T")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Runner:
    """Device, precision and processes of a measurement; by default this process on the CPU in fp32.

    Args:
        device: Device of the network. Tokens and sums are moved to it.
        autocast: Function that returns a context manager for a forward pass, such as ``torch.autocast``.
        precision: Name of the precision in the results, such as ``bf16-mixed``.
        rank: Number of this process, 0..processes - 1.
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
        """Yield the items of this process, each with its index. The processes take items in turn."""
        for i in self.progress(range(self.rank, len(items), self.processes)):
            yield i, items[i]

    def blocks(self, blocks: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Yield the blocks of this process: the index of a block, and its tokens (1, N+1) int64 on the device."""
        for i, tokens in self.part(blocks):
            yield i, tokens.to(self.device)[None]

    def losses(self, groups: int = 1) -> "TokenLoss":
        """Return empty sums of losses by group, on the device."""
        from kerple.measure.loss_metrics import TokenLoss  # imports torchmetrics, which takes seconds

        return TokenLoss(groups).to(self.device)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes, on the CPU. The tensor itself may be overwritten."""
        if self.processes > 1:
            torch.distributed.all_reduce(x)
        return x.cpu()

    def synchronise(self, *losses: "TokenLoss") -> None:
        """Replace the sums of this process by the sums over all processes, on the CPU.

        Raises:
            UserError: If a sum of losses is not finite.
        """
        for loss in losses:
            if self.processes > 1:  # a runner of one process may be used in a process group
                loss.sync()
            loss.cpu()
            if not loss.nll.isfinite().all():
                raise UserError("model: the loss of the text is not finite; check the weights for NaN")

    @classmethod
    def detect(cls, device: str | None = None, precision: str = "32-true") -> "Runner":
        """Return a runner for a program without Lightning. The work is divided among the processes of torchrun.

        Args:
            device: ``cpu`` or ``cuda``; None for a GPU if there is one, else the CPU. A process that torchrun starts
                uses the GPU of its local rank.
            precision: ``32-true``, ``bf16-mixed``, ``16-mixed``, or ``auto`` to choose by the device.

        Raises:
            UserError: If the precision is not one of these, or ``device`` is ``cuda`` and there is no CUDA device.
        """
        processes, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
        available = kind != "cuda" or torch.cuda.is_available()
        require(available, "device", "cuda", "cpu, because torch finds no CUDA device")
        torch_device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if kind == "cuda" else kind)
        if processes > 1 and not torch.distributed.is_initialized():
            torch.distributed.init_process_group("nccl" if kind == "cuda" else "gloo")
        precision = choose_precision(kind)[0] if precision == "auto" else precision
        dtypes = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
        require(precision in dtypes, "precision", precision, f"one of auto, {', '.join(dtypes)}")
        dtype = dtypes[precision]
        autocast = nullcontext if dtype is None else partial(torch.autocast, torch_device.type, dtype)
        return cls(torch_device, autocast, precision, rank, processes)
