"""Ranges of numeric options, in one table, with which a configuration is compared before anything is built."""

import math
from collections.abc import Iterator
from importlib import import_module
from inspect import isclass, signature
from typing import Any

import psutil
from jsonargparse import Namespace

from kerple.base.errors import UserError
from kerple.base.signatures import options, takes_null, takes_several

COUNT, ENDLESS = 1 << 40, (1 << 63) - 1  # the largest count, and the largest int64
LARGEST_OF_A_PART = 1 << 24  # the largest width, number of rows, distance or number of digits of a strategy or a task
RANGES: dict[str, tuple[float, float]] = {
    "seed_everything": (0, (1 << 32) - 1),
    "model.layers": (1, 10_000),
    "model.dim": (1, 1 << 18),
    "model.heads": (1, 1 << 18),
    "model.kv_heads": (1, 1 << 18),
    "model.hidden": (1, 1 << 20),
    "model.eps": (0, 1),
    "model.init": (0, 1000),
    "model.pad_vocabulary_to": (1, 1 << 20),
    "model.lr": (0, 1e6),
    "model.betas": (0, 1),
    "model.adam_eps": (0, 1),
    "model.weight_decay": (0, 1e6),
    "data.length": (1, 1 << 30),
    "data.batch_size": (1, 1 << 20),
    "data.eval_batch_size": (1, 1 << 20),
    "data.vocabulary": (1, 1 << 32),
    "data.seed": (0, ENDLESS),
    "data.workers": (0, 1024),
    "data.prepare_workers": (0, 1024),
    "data.train_length": (1, 1 << 20),
    "data.test_lengths": (1, 1 << 20),
    "data.validation_examples": (1, 1 << 24),
    "data.test_examples": (1, 1 << 24),
    "data.validation_segments": (1, COUNT),
    "data.cache_bytes": (1, ENDLESS),
    "data.samples": (1, COUNT),
    "data.shares": (0, 1),
    "data.largest_document": (1, COUNT),
    "data.largest_loss": (0, 1),
    "data.shuffle_shards": (1, COUNT),
    "data.mixture": (0, 1e9),
    "data.examples": (1, COUNT),
    "trainer.devices": (-1, 1 << 16),
    "trainer.num_nodes": (1, 1 << 20),
    "trainer.max_steps": (-1, ENDLESS),
    "trainer.min_steps": (0, ENDLESS),
    "trainer.max_epochs": (-1, ENDLESS),
    "trainer.min_epochs": (0, ENDLESS),
    "trainer.limit_train_batches": (0, ENDLESS),
    "trainer.limit_val_batches": (0, ENDLESS),
    "trainer.limit_test_batches": (0, ENDLESS),
    "trainer.limit_predict_batches": (0, ENDLESS),
    "trainer.val_check_interval": (0, ENDLESS),
    "trainer.check_val_every_n_epoch": (1, ENDLESS),
    "trainer.num_sanity_val_steps": (-1, ENDLESS),
    "trainer.log_every_n_steps": (0, ENDLESS),
    "trainer.accumulate_grad_batches": (1, 1 << 32),
    "trainer.gradient_clip_val": (0, math.inf),
    "trainer.reload_dataloaders_every_n_epochs": (0, ENDLESS),
}
BASES = {  # of what has to be chosen; a base class alone can do nothing
    "data": "LightningDataModule",
    "model.position": "Position",
}
OUTSIDE = {"model.betas": 1, "model.adam_eps": 0, "model.lr": 0, "model.init": 0}  # ends outside their range


def check(config: Namespace, command: str, model: type | None = None) -> None:
    """Hold a command's configuration against the table.

    Args:
        config: Of the command, resolved.
        command: ``fit`` and ``plan`` need a number of steps; ``plan`` is for other machines than this one, too.
        model: The class whose options are in the section ``model``, None where the command has no such section.

    Raises:
        UserError: A section is no mapping, the data would lose their order, a number is outside its range or none at
            all (NaN), an option is null or a list that its class cannot take, or the model is larger than the memory.
    """
    given = config.as_dict()
    trainer = import_module("pytorch_lightning").Trainer if "trainer" in given else None  # slow to import
    sections = (("model", model), ("data", None), ("trainer", trainer))
    for section, _ in sections:
        if not isinstance(given.get(section, {}), dict):
            raise UserError(f"{section}: got {given[section]!r}, expected a mapping of options")
    overfit = given.get("trainer", {}).get("overfit_batches")
    if overfit:
        raise UserError(
            f"trainer.overfit_batches: got {overfit}, expected 0: Lightning would take the order of the data away; "
            "give data.samples to train on few samples of shards"
        )
    for name, base in BASES.items():
        chosen = config.get(name, {"class_path": ""})
        if "class_path" not in chosen or chosen["class_path"].rpartition(".")[2] == base:
            raise UserError(f"{name}: got {chosen!r}, expected the name of a class that is a {base}")
    for section, owner in sections:
        for name, value, expected in _misfits(given.get(section), owner, section):
            raise UserError(f"{name}: got {value}, expected {expected}")
    for name, number in _numbers(given):
        low, high = RANGES.get(name, (-math.inf, math.inf))
        if name == "trainer.max_steps" and command in ("fit", "plan"):
            low = 1  # the schedule needs the number of steps
        if math.isnan(number) or not low <= number <= high or (isinstance(number, int) and abs(number) > ENDLESS):
            expected = f"a number from {_told(low)} to {_told(high)}" if name in RANGES else "a number of 64 bits"
            raise UserError(f"{name}: got {number}, expected {expected}")
        of_a_part = name.startswith(("model.position.", "data.task.")) and isinstance(number, int)
        if of_a_part and abs(number) > LARGEST_OF_A_PART:
            raise UserError(f"{name}: got {number}, expected a number up to {LARGEST_OF_A_PART}")
        if number == OUTSIDE.get(name):
            raise UserError(f"{name}: got {number}, expected a number between {_told(low)} and {_told(high)}")
    if command != "plan":
        _check_size(config.get("model"))


def _misfits(node: Any, owner: Any, name: str) -> Iterator[tuple[str, Any, str]]:
    """Names of options, their values and what is expected, where the parser lets through what their class cannot take.

    In a file these are nulls, and on the command line lists where a class or a text is expected.
    """
    if isinstance(node, dict) and "class_path" in node:
        module, _, last = str(node["class_path"]).rpartition(".")
        yield from _misfits(node.get("init_args") or {}, getattr(import_module(module), last, None), name)
    elif isinstance(node, dict):
        known, own = (options(owner), signature(owner.__init__).parameters) if isclass(owner) else ({}, {})
        for key, value in node.items():
            if value is None and key in own and own[key].default is not None and not takes_null(known[key]):
                yield f"{name}.{key}", "null", "a value; leave the option out for its default"
            elif isinstance(value, list) and key in known and not takes_several(known[key]):
                yield f"{name}.{key}", value, "a single value"
            elif key == "monitor" and value == "":
                yield f"{name}.{key}", repr(value), "the name of a metric that is logged, such as val/loss"
            yield from _misfits(value, None, f"{name}.{key}")
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _misfits(value, None, name)


def _numbers(node: Any, name: str = "") -> Iterator[tuple[str, int | float]]:
    """Yield the numbers of a configuration with the names of their options on the command line."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _numbers(value, name if key == "init_args" else f"{name}.{key}".lstrip("."))
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _numbers(value, name)
    elif isinstance(node, int | float) and not isinstance(node, bool):
        yield name, node


def _told(number: float) -> str:
    exponent = math.log2(number + 1) if 0 < number < math.inf else 0.0
    return f"2^{round(exponent)} - 1" if exponent >= 30 and exponent.is_integer() else f"{number:,.12g}"


def _check_size(model: Any) -> None:
    """Refuse a model whose weights are larger than the memory of this machine; building it could end other programs."""
    if not isinstance(model, Namespace) or not all(isinstance(model.get(key), int) for key in ("layers", "dim")):
        return
    hidden = model.get("hidden") or 4 * model.dim
    numbers = model.layers * model.dim * (2 * model.dim + 2 * hidden) + (model.get("vocabulary") or 0) * model.dim
    there = psutil.virtual_memory().total
    if 4 * numbers > there:
        raise UserError(
            f"model: layers {model.layers}, dim {model.dim}, hidden {hidden} are {numbers:,} parameters or more, "
            f"{4 * numbers / 1e9:,.0f} GB; this machine has {there / 1e9:,.0f} GB; choose a smaller model"
        )
