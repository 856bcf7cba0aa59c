"""`RandomState`: keeps the random state of training separate from other draws, and saves it in checkpoints."""

import os
import random
from functools import reduce
from typing import Any

import numpy as np
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor, distributed
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from kerple.base.processor_cores import CHOSEN, cores
from kerple.training.trainer import print_once

KEY, THREADS = "random_states", "threads"
State = dict[str, Any]


class RandomState(Callback):
    """Stores the random state at the end of each micro-batch, and restores it at the start of the next one.

    Random numbers that validations, loaders and sanity checks draw therefore have no effect on training. A resumed run
    draws the same numbers as an uninterrupted one. Each rank has its own state, and a checkpoint contains the states of
    all ranks. If a run is resumed with more ranks, the generators of an additional rank are seeded by the run's seed,
    the rank and the step.

    A checkpoint also contains the number of CPU threads, because sums over parts round differently for each number. A
    resumed run on a CPU uses this number, unless the user has set one or there are fewer cores. For the same reason,
    DDP on a CPU adds the gradients of more than two ranks by `add_in_rank_order`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._state: State | None = None  # at the end of the last micro-batch
        self._stored: list[State] | None = None  # of each rank in the checkpoint from which the run resumes

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = trainer.strategy.model
        if isinstance(model, DistributedDataParallel) and trainer.world_size > 2 and pl_module.device.type == "cpu":
            model.register_comm_hook(None, add_in_rank_order)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rank = trainer.global_rank
        if self._stored is not None and rank < len(self._stored):
            self._state = self._stored[rank]
        else:
            if rank or self._stored is not None:
                # all ranks had the same seed, so that their weights are equal; now their random numbers must differ
                seeds = np.random.SeedSequence([torch.initial_seed(), rank, trainer.global_step]).generate_state(3)
                torch.manual_seed(int(seeds[0]))
                random.seed(int(seeds[1]))
                np.random.seed(int(seeds[2]))  # noqa: NPY002 (libraries draw from the global generator)
            self._state = capture(pl_module.device)
        self._stored = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        assert self._state is not None
        restore(self._state, pl_module.device)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._state = capture(pl_module.device)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[THREADS] = torch.get_num_threads()
        states = [self._state]
        if trainer.world_size > 1:  # this runs on every rank, but only the first writes
            states = [None] * trainer.world_size
            torch.distributed.all_gather_object(states, self._state)
        if None not in states:
            checkpoint[KEY] = states

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._stored = checkpoint.get(KEY)
        before, now = checkpoint.get(THREADS), torch.get_num_threads()
        if not isinstance(before, int) or before == now or trainer.strategy.root_device.type != "cpu":
            return
        if ("OMP_NUM_THREADS" in os.environ and CHOSEN not in os.environ) or not 1 <= before <= cores():
            print_once(f"threads: {before} -> {now}, so the run will not be bit for bit that of {before} threads")
        else:
            torch.set_num_threads(before)
            print_once(f"threads: {before}, because the run was started with this number")


def add_in_rank_order(_: None, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
    """Return the mean of a bucket's gradients over ranks, which are added in the order of the ranks: a hook of DDP.

    In gloo's sum, the order depends on the place of a gradient in its bucket, and DDP builds other buckets after its
    first step. A resumed run would therefore round its first step differently. As in gloo's sum, each rank adds a part
    of the bucket, so that the same number of bytes is sent.
    """
    ranks, gradients = distributed.get_world_size(), bucket.buffer()
    own = pad(gradients, (0, -len(gradients) % ranks)) / ranks
    of_ranks = torch.empty_like(own)  # this rank's part of the bucket, from each rank
    distributed.all_to_all_single(of_ranks, own)
    work = distributed.all_gather([*own.chunk(ranks)], reduce(torch.add, of_ranks.chunk(ranks)), async_op=True)
    return work.get_future().then(lambda _: own[: len(gradients)])


def capture(device: torch.device) -> State:
    """Return the states of the generators of torch (CPU and device), numpy and Python."""
    state: Any = np.random.get_state()  # noqa: NPY002
    name, keys, position, has_gauss, gauss = state
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
        "python": random.getstate(),
    }


def restore(state: State, device: torch.device) -> None:
    """Set all generators to the states that `capture` returned."""
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), position, has_gauss, gauss))  # noqa: NPY002
    random.setstate(state["python"])
