"""`training_seconds`: estimates the training time of a comparison from its FLOPs and the speed of a matrix product."""

import json
import time
from functools import cache
from typing import Any

import torch

from kerple.config.auto_precision import choose_precision, emulated
from kerple.model.cost import flops
from kerple.training.fit_options import accumulated_batches, build_model

# speed of a fit relative to a matrix product: 0.2 to 0.5 at width 64 and 128 (fp32 and bf16, a core of an AMD EPYC)
EFFICIENCY = 0.33
START = 20.0  # seconds that the starts of a fit and of its test take together


def training_seconds(configs: list[dict[str, Any]], parallel: int) -> float | None:
    """Estimate the time of fits and of the starts of their tests. Computations of tests and strategies are not counted.

    Args:
        configs: Resolved configurations, nested.
        parallel: Number of fits at a time, which share the processor.

    Returns:
        Seconds, or None if a configuration lacks the number of steps, the batch size, the length or the vocabulary.
    """
    seconds = START * len(configs) / parallel
    for config in configs:
        data, trainer = config["data"].get("init_args", {}), config["trainer"]
        if trainer["max_steps"] < 1 or not {"batch_size", "length", "vocabulary"} <= data.keys():
            return None
        options = config["model"] | {"length": data["length"], "vocabulary": data["vocabulary"], "position": "NoPE"}
        tokens = trainer["max_steps"] * accumulated_batches(trainer) * data["batch_size"] * data["length"]
        accelerator = trainer["accelerator"]
        precision = str(trainer["precision"]).replace("auto", choose_precision(accelerator)[0])
        bf16 = "bf16" in precision and not emulated(precision, accelerator)  # emulated products are computed in fp32
        on_cuda = accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
        speed = EFFICIENCY * _speed(torch.bfloat16 if bf16 else torch.float32, "cuda" if on_cuda else "cpu")
        seconds += tokens * _training_flops(json.dumps(options)) / speed
    return seconds


@cache
def _training_flops(options: str) -> int:
    """Return the FLOPs per token for training a model with these options in JSON, which `cache` can hash."""
    with torch.device("meta"):
        model = build_model(json.loads(options))
    return flops(model.network, model.network.shape.length).training


@cache
def _speed(dtype: torch.dtype, device: str) -> float:
    """Return the FLOPs per second of a matrix product, measured for one second."""
    x = torch.ones(1024, 1024, dtype=dtype, device=device)
    (x @ x)[0, 0].item()  # the first product takes longer
    count, start = 0, time.perf_counter()
    while (seconds := time.perf_counter() - start) < 1:
        (x @ x)[0, 0].item()  # waits for the device
        count += 1
    return count * 2 * 1024**3 / seconds
