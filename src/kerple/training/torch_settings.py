"""Settings of torch, warnings and log messages for all commands that compute."""

import logging
import os
import warnings

import torch
from lightning_utilities.core.rank_zero import rank_zero_only

from kerple.base.processor_cores import free_cores

# warnings in every run that require no action
HARMLESS = (
    "The dirpath has changed",  # a test has its own folder
    r"`isinstance\(treespec, LeafSpec\)`",
    ".*does not have many workers",  # memory-mapped shards need no workers
    ".*is not supported by the model summary",  # about its estimate of the model's size, which is not used
)


def configure_torch() -> None:
    """Set TF32 on a GPU and deterministic matrix products on a CPU, use free cores, and filter messages.

    Exact resuming needs deterministic matrix products. MKL provides them only in its reproducible mode, and only with a
    fixed number of threads. On ranks other than 0, this project logs only warnings.
    """
    if torch.cuda.is_available():  # on a CPU, "high" made a training step at width 64 up to four times slower
        torch.set_float32_matmul_precision("high")
    os.environ.setdefault("MKL_CBWR", "AUTO")  # MKL reads it at the first product
    # Lightning's tips are advertisements
    logging.getLogger("pytorch_lightning.utilities.rank_zero").addFilter(lambda r: "Tip:" not in r.getMessage())
    # a message for every checkpoint that contains more than weights
    logging.getLogger("pytorch_lightning.trainer.connectors.checkpoint_connector").setLevel(logging.WARNING)
    for message in HARMLESS:
        warnings.filterwarnings("ignore", message)
    logger = logging.getLogger("kerple")
    logger.setLevel(logging.WARNING if getattr(rank_zero_only, "rank", 0) else logging.INFO)
    logger.handlers = [logging.StreamHandler()]  # a new handler, because notebooks and tests replace sys.stderr
    threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ and (free := free_cores()) < threads:  # not set by the user or --threads
        logger.info("threads: %d instead of %d, as other processes use the cores; --threads sets it", free, threads)
        threads = free
    torch.set_num_threads(threads)  # even if unchanged: MKL then does not choose a number of threads for each product
