"""Settings of torch, warnings and log messages for all commands that compute."""

import logging
import os
import warnings

import torch
from lightning_utilities.core.rank_zero import rank_zero_only

# warnings in every run, about which a user has nothing to do
HARMLESS = (
    "The dirpath has changed",  # a test writes into a folder of its own
    r"`isinstance\(treespec, LeafSpec\)`",
    ".*does not have many workers",  # memory-mapped shards need none
    ".*is not supported by the model summary",  # about an estimate of megabytes that is not used
)


def configure_torch() -> None:
    """Choose TF32 on a GPU and reproducible products on a CPU, and silence warnings and all processes but the first.

    Resumption bit for bit needs deterministic matrix products. MKL gives them only in its reproducible
    mode, and only if it does not choose the number of threads.
    """
    if torch.cuda.is_available():  # TF32; on the CPU "high" is a slower path, four times at width 64
        torch.set_float32_matmul_precision("high")
    os.environ.setdefault("MKL_CBWR", "AUTO")  # read at the first product
    torch.set_num_threads(torch.get_num_threads())  # a fixed number stops MKL from choosing one
    # Lightning's tips advertise its other products
    logging.getLogger("pytorch_lightning.utilities.rank_zero").addFilter(lambda r: "Tip:" not in r.getMessage())
    # it says of every checkpoint that it holds more than weights
    logging.getLogger("pytorch_lightning.trainer.connectors.checkpoint_connector").setLevel(logging.WARNING)
    for message in HARMLESS:
        warnings.filterwarnings("ignore", message)
    logger = logging.getLogger("kerple")
    logger.setLevel(logging.WARNING if getattr(rank_zero_only, "rank", 0) else logging.INFO)
    logger.handlers = [logging.StreamHandler()]  # to the standard error of now: notebooks and tests replace it
