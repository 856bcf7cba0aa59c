"""Cost of a fit before it runs: its work, the memory of a device, and the hours on several kinds of devices."""

from typing import Any
from zipfile import is_zipfile

import numpy as np
import pandas as pd
import torch
from jsonargparse import Namespace

from kerple.base.errors import UserError, require
from kerple.base.run_folder import weights_file
from kerple.config.checkpoint_agreement import SAMPLES_PER_STEP, accumulation_schedule
from kerple.config.untrusted_checkpoints import CONFIG, load, not_a_checkpoint
from kerple.data.documents import mean_visible_keys
from kerple.data.mixture import Part
from kerple.data.shard_options import ShardOptions
from kerple.model.cost import Chip, count_parameters, flops, memory
from kerple.training.feasibility import check_memory
from kerple.training.fit_options import accumulated_batches, build_model, steps_and_batches
from kerple.training.language_model import LanguageModel

NODE = 8  # devices per node
NETWORK = 50e9  # bytes per second between devices of two nodes: 400 Gb/s for each device
AUTOCAST = dict.fromkeys(("auto", "bf16-mixed", "bf16"), torch.bfloat16)
AUTOCAST |= dict.fromkeys(("16-mixed", "16"), torch.float16)


def cost_tables(config: Namespace, chips: list[Chip], devices: list[int], efficiency: float) -> list[str]:
    """Return three tables: the work, the memory of a device, and the hours.

    Args:
        config: Resolved options of `fit`.
        chips: Kinds of devices in the table of hours.
        devices: Numbers of devices in the table of hours; empty for 1, 8 and 64, without those that are larger than
            the number of sequences in a step.
        efficiency: Fraction of a chip's peak FLOP/s that training reaches.

    Raises:
        UserError: If an option that `plan` needs is not a number, or a step has fewer sequences than devices.
    """
    data, trainer = config.data.init_args, config.trainer
    for name in ("batch_size", "length"):
        number = data.get(name)
        if not isinstance(number, int) or number < 1:
            raise UserError(f"data.{name}: got {number} in {config.data.class_path}, expected a number of 1 or more")
    expected = "1 or more, the number of steps to plan, also with max_epochs"
    require(trainer.max_steps >= 1, "trainer.max_steps", trainer.max_steps, expected)
    largest = max(chip.memory for chip in chips) * max([*devices, 8 * NODE])
    check_memory(config, largest, "the largest number of devices")  # a model that is too large takes too long to build
    with torch.device("meta"):
        model = build_model(config.model.as_dict())
    count = count_parameters(model.network)
    visible, documents = _visible_fraction(data)
    work = flops(model.network, data.length, visible)
    planned_devices = device_count(trainer.devices) * trainer.num_nodes
    accumulated = accumulated_batches(trainer)
    segments = data.batch_size * accumulated * planned_devices
    micro, step = data.batch_size * data.length, segments * data.length  # tokens of a micro-batch, and of a step
    advice = "the number of sequences in a step; use fewer, or increase data.batch_size"
    most = max(devices, default=1)
    require(most <= segments, "devices", most, f"at most {segments}, {advice}")
    devices = devices or [n for n in (1, NODE, 8 * NODE) if n <= segments]
    samples = data.get("samples")
    epoch_batches = max(1, samples // (data.batch_size * planned_devices)) if samples else None
    steps, batches = steps_and_batches(trainer, epoch_batches)
    tokens = batches * micro * planned_devices
    in_epoch = "" if tokens == step * steps else ", in full steps of the first epoch"
    total = work.training * tokens
    rows = {
        "parameters": f"{sum(count.values()):,}",
        **{f"  {part}": f"{n:,}" for part, n in count.items()},
        "steps": f"{steps:,}",
        "tokens a step": f"{step:,} = {data.batch_size} × {data.length} × {accumulated} accumulated "
        f"× {planned_devices} devices{in_epoch}",
        "tokens": f"{tokens:,}",
        **documents,
        "FLOPs a token": f"{work.training:,} = 3 × (linear layers {work.products:,} + attention {work.attention:,})",
        "FLOPs": f"{total:.3g}",
        **_parent_rows(config.get("weights"), model, total),
    }
    precision = AUTOCAST.get(str(trainer.precision))
    if dtype := {"bf16-true": torch.bfloat16, "64-true": torch.float64}.get(str(trainer.precision)):
        model.network.to(dtype)
    needed = memory(model.network, data.batch_size, data.length, precision, moments(model))
    sizes = {part: f"{size / 2**30:.2f} GiB" for part, size in needed.items()}
    if model.build_optimiser is not None:
        sizes["optimiser"] += ", if it has two moments per parameter"
    sharding = ", if parameters were not sharded" if "shard" in str(trainer.strategy).lower() else ""
    # DDP exchanges gradients in buckets during the backward pass. The bucket with parameters of a strategy that all
    # layers share waits for the end of this pass. The hours then include the exchange of all buckets, an overestimate.
    overlap = len(model.network.positions) > 1 or not count.get("positions")
    return [
        _text("Work", rows),
        _text(f"Memory of a device, {micro:,} tokens at once{sharding}", sizes),
        _hours(total / efficiency, needed, steps, chips, devices, overlap),
    ]


def _parent_rows(weights: str | None, model: LanguageModel, stage: float) -> dict[str, str]:
    """Return rows about the fits from which a second stage starts; none if ``weights`` is not of a fit.

    There are none either if the number of samples per step is not known or changes by epoch.

    Args:
        weights: The option ``weights``: a run or a checkpoint. A parent may be a stage too.
        model: The model, with as many parameters as those of the earlier fits.
        stage: FLOPs of the stage.
    """
    tokens, work = 0, 0.0
    while weights is not None and is_zipfile(path := weights_file(weights)):
        content = load(path, "meta")
        try:
            length, weights = int(content["hyper_parameters"]["length"]), content[CONFIG].get("weights")
            if content[SAMPLES_PER_STEP] is None or accumulation_schedule(content[CONFIG]["trainer"]):
                return {}
            trained = int(content["global_step"] * content[SAMPLES_PER_STEP] * length)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise not_a_checkpoint(path, error) from error
        tokens, work = tokens + trained, work + trained * flops(model.network, length).training
    if not tokens:
        return {}
    both = f"{work + stage:.3g}, of which the stage is {stage / (work + stage):.1%}"
    return {"parent's tokens": f"{tokens:,}", "parent's FLOPs": f"{work:.3g}, without masks", "FLOPs of both": both}


def _visible_fraction(data: Namespace) -> tuple[float, dict[str, str]]:
    """Return the fraction of causal pairs inside one document, and rows of the table of the work about it."""
    if not data.get("mask_documents"):
        return 1.0, {}
    options = ShardOptions(**data.as_dict())
    keys, most = 0.0, (data.length + 1) / 2
    for name, weight in (options.mixture or {options.location: 1.0}).items():
        try:
            part = Part.open(name, options.cache, options.cache_gb)
        except UserError:
            return 1.0, {"keys a query": f"as in one document a sample, because {name} is not prepared"}
        stream = part.stream("train")
        lengths = np.diff(part.begins(stream), append=len(stream))
        keys += weight * mean_visible_keys(lengths, data.length, options.packing == "best_fit")
    return keys / most, {"keys a query": f"{keys:,.1f} on average within documents, of {most:,.1f} without masks"}


def device_count(devices: Any) -> int:
    """Return the number of devices per node in the option ``trainer.devices``; 1 for ``auto``.

    Raises:
        UserError: If the option is -1, all devices of the machine that trains, whose number is not known here.
    """
    require(str(devices) != "-1", "trainer.devices", devices, "the number of devices of a node; -1 means all of them")
    numbers = devices if isinstance(devices, list) else str(devices).rstrip(",").split(",")
    return max(len(numbers), int(devices) if str(devices).isdecimal() else 1)


def moments(model: LanguageModel) -> float:
    """Return the mean number of optimiser moments per parameter: 2, but 1 for the matrices that Muon updates."""
    if not model.muon:
        return 2.0
    matrices = sum(p.numel() for group in model._muon_groups() for p in group["params"])
    return 2.0 - matrices / sum(p.numel() for p in model.parameters())


def _text(title: str, rows: dict[str, str]) -> str:
    return "\n".join([title, *(f"{name:15}  {value}" for name, value in rows.items())])


def _hours(
    total: float, needed: dict[str, int], steps: int, chips: list[Chip], devices: list[int], overlap: bool
) -> str:
    """Return the table of hours: whether a training step fits in memory, and the time on each number of devices.

    Args:
        total: FLOPs of the fit, divided by the efficiency.
        needed: Bytes on a device, by part.
        steps: Number of optimiser steps.
        chips: Kinds of devices, the rows.
        devices: Numbers of devices, the columns.
        overlap: Whether the exchange of gradients overlaps with the backward pass.
    """
    fits = ["yes" if needed["total"] < 0.9 * chip.memory else "no: use gradient accumulation" for chip in chips]
    table = pd.DataFrame({"fits": fits}, [chip.name for chip in chips])
    for n in devices:
        hours = []
        for chip in chips:
            compute = total / steps / n / chip.flops  # seconds per step
            rate = chip.link if n <= NODE else NETWORK
            exchange = 2 * needed["gradients"] * (n - 1) / n / rate  # a ring sends (n - 1) / n of the gradients twice
            backward = overlap * compute * 2 / 3  # seconds of the backward pass in which the exchange costs no time
            hours.append(f"{steps * (compute + max(0.0, exchange - backward)) / 3600:.2f}")
        table[f"{n} device{'s' * (n > 1)} ({-(-n // NODE)} node{'s' * (n > NODE)})"] = hours
    return f"Hours, with tokens divided over all devices\n{table.to_string()}"
