"""Refusal of fits that need more nodes or memory than there are, before anything is allocated."""

import os

import psutil
import torch
from jsonargparse import Namespace

from kerple.base.errors import UserError

# variables of which a launcher of several nodes sets at least one: torchrun, Slurm, LSF, MPI
LAUNCHERS = ("MASTER_ADDR", "SLURM_JOB_ID", "LSB_JOBID", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
BYTES = 2  # of a number in the lowest precision


def check_nodes(trainer: Namespace) -> None:
    """Raise a UserError if several nodes are expected, but no launcher has set their addresses."""
    if trainer.num_nodes > 1 and not trainer.plugins and not any(name in os.environ for name in LAUNCHERS):
        expected = "expected 1, because no launcher of several nodes has set MASTER_ADDR"
        raise UserError(f"trainer.num_nodes: got {trainer.num_nodes}, {expected}; start the fit with torchrun or srun")


def machine_memory() -> int:
    """Return the bytes of memory, swap and all GPUs of this machine."""
    gpus = range(torch.cuda.device_count())
    memory = psutil.virtual_memory().total + psutil.swap_memory().total
    return memory + sum(torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus)


def check_memory(config: Namespace, available: int, where: str) -> None:
    """Check that the available memory is not below a lower bound of the memory of a fit.

    The bound is the larger of the weights with their gradients and the inputs of the first block. The weights are two
    matrices of each attention, two of each hidden layer, and the embedding.

    Args:
        config: Resolved options of `fit`.
        available: Bytes on each node, because the weights can be divided over all nodes.
        where: Name of the memory, for the message.

    Raises:
        UserError: If the bound is larger. It names the options with the largest influence.
    """
    model, data = config.model, config.data.get("init_args", Namespace())
    numbers = (data.get(name) for name in ("vocabulary", "batch_size", "length"))
    vocabulary, batch, length = (number if isinstance(number, int) else 0 for number in numbers)  # of any data class
    width = model.heads * (model.get("head_dim") or model.dim // max(1, model.heads))
    matrices = 2 * model.layers * model.dim * (width + (model.get("hidden") or model.dim))
    needed, options = max(
        (2 * BYTES * matrices // config.trainer.num_nodes, "model.layers, model.dim or model.hidden"),
        (2 * BYTES * vocabulary * model.dim // config.trainer.num_nodes, "data.vocabulary or model.dim"),
        (BYTES * model.dim * batch * length, "data.batch_size or data.length"),
    )
    if needed > available:
        given = f"at least {needed / 2**30:,.0f} GiB are needed, {where} has {available / 2**30:,.0f} GiB"
        raise UserError(f"{options}: {given}; use smaller values")
