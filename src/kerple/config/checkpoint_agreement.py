"""Checks that the configuration of a test or a resumed training agrees with the configuration in the checkpoint."""

import sys
from pathlib import Path
from typing import Any

from pytorch_lightning import LightningModule
from pytorch_lightning.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging, WeightAveraging

from kerple.base.errors import UserError
from kerple.config.flat_configuration import FOLDER_OPTIONS, differences, flat
from kerple.config.options import listed
from kerple.config.untrusted_checkpoints import CONFIG

SAMPLES_PER_STEP = "samples_per_step"  # key in a checkpoint: samples per step over all devices and micro-batches
# these may differ, because they only select an implementation
IMPLEMENTATION = ("model.compile", "model.attention", "model.checkpoint_activations")
# options of data modules that change the training samples or their order
SAMPLE_ORDER: tuple[str, ...] = ("seed", "length", "samples", "sections", "packing", "mixture")
SAMPLE_ORDER += ("examples", "train_length", "held_out", "task")
DOCUMENTS = ("mask_documents", "restart_positions", "score_first_targets")  # they change the loss
MUST_BE_EQUAL: tuple[str, ...] = ("seed_everything", "model.", "trainer.max_steps", "data.class_path")
MUST_BE_EQUAL += tuple(f"data.init_args.{name}" for name in SAMPLE_ORDER + DOCUMENTS)
STRATEGIES = "network.positions."  # beginning of the names of strategies' parameters
NOT_COMPARED = (*FOLDER_OPTIONS, "weights", "weights_only", "trainer.default_root_dir", "trainer.callbacks")


def check_tested_model(path: str, content: dict[str, Any], config: dict[str, Any], model: LightningModule) -> None:
    """Check that a test uses the checkpoint's model. Only the positional strategy may differ.

    A strategy of another class must have no parameters, because those of the checkpoint, even with the same names, were
    trained for another formula.

    Args:
        path: Path of the checkpoint, for messages.
        content: The loaded checkpoint.
        config: The configuration of the command, nested.
        model: The model with this configuration.

    Raises:
        UserError: If the architecture differs, or the positional strategy has parameters that the checkpoint lacks, or
            that were trained for another class.
    """
    changes = _changes({"model": content[CONFIG]["model"]}, {"model": config["model"]})
    if others := [change for change in changes if not change.startswith("model.position.")]:
        raise UserError(f"{'; '.join(others)}: expected the architecture of {path}; leave these options out of a test")
    check_weights(path, content, model, other_strategy=bool(changes))
    parameters = [name for name, _ in model.named_parameters() if name.startswith(STRATEGIES)]
    if parameters and (classes := [change for change in changes if "class_path" in change]):
        expected = f"the strategy of {path}, which trained {parameters[0]}, or a strategy without parameters"
        raise UserError(f"{'; '.join(classes)}: expected {expected}")
    if changes:
        model.strict_loading = False  # weights of the replaced positional strategy are not loaded
        print(f"tested with another strategy (model.position) than that of {path}: {'; '.join(changes)}", flush=True)


def check_weights(path: str, content: dict[str, Any], model: LightningModule, other_strategy: bool = False) -> None:
    """Check that a checkpoint has all weights of the model and no others.

    Args:
        path: Path of the checkpoint, for messages.
        content: The loaded checkpoint.
        model: The model.
        other_strategy: Whether the model has another positional strategy than the checkpoint. The checkpoint may then
            have more weights than the model.

    Raises:
        UserError: If a weight is missing, has another shape, or is not in the model.
    """
    weights, expected = content.get("state_dict", {}), model.state_dict()
    mismatched = [name for name, value in expected.items() if getattr(weights.get(name), "shape", None) != value.shape]
    mismatched += [] if other_strategy else [name for name in weights if name not in expected]
    if mismatched:
        stored, built = (getattr(part.get(mismatched[0]), "shape", "missing") for part in (weights, expected))
        difference = f"{mismatched[0]} is {stored} in the checkpoint and {built} in the model"
        advice = "use the options of the fit, or a model.position without parameters"
        raise UserError(f"ckpt_path: the weights in {path} do not fit the model: {difference}; {advice}")


def check_resumption(path: str | Path, content: dict[str, Any], config: dict[str, Any], samples: int | None) -> None:
    """Check that a resumed training continues the same training, and print other differences.

    Args:
        path: Path of the checkpoint, for messages.
        content: The loaded checkpoint.
        config: The configuration of the command, nested.
        samples: Samples per step over all devices and micro-batches; None if the data has no batch size.

    Raises:
        UserError: If the seed, the length, the order of the data, the samples per step, their schedule, the averaging
            of weights, the model, its optimiser or the number of steps differs, or a run without sharding is resumed
            with sharding.
    """
    changes = _changes(content[CONFIG], config)
    conflicts = [change for change in changes if change.startswith(MUST_BE_EQUAL)]
    earlier, schedule = (accumulation_schedule(each["trainer"]) for each in (content[CONFIG], config))
    if earlier != schedule:
        conflicts.append(f"scheduling of GradientAccumulationScheduler: {earlier} -> {schedule}")
    averages = [weight_averaging(each["trainer"]) for each in (content[CONFIG], config)]
    if averages[0] != averages[1]:
        conflicts.append(f"averaging of weights: {averages[0] or None} -> {averages[1] or None}")
    before = content.get(SAMPLES_PER_STEP)
    if samples is not None and before is not None and samples != before:
        conflicts.append(f"samples per step over all devices: {before} -> {samples}")
    # with sharding, Lightning expects the optimiser's moments in the order of the model's parameters; without
    # sharding, they are stored in the order of the optimiser's groups
    if ["ShardedBlocks" in str(each["trainer"]["strategy"]) for each in (content[CONFIG], config)] == [False, True]:
        conflicts.append("trainer.strategy: without sharding -> with sharding")
    if conflicts:
        advice = f"use the earlier options, or start a new training from its weights with --weights {path}"
        raise UserError(f"ckpt_path: {path} is a checkpoint of another training: {'; '.join(conflicts)}; {advice}")
    if changes:
        print(f"resumed with other options than before: {'; '.join(changes)}", flush=True)


def accumulation_schedule(trainer: Any) -> dict[int, int] | None:
    """Return the number of accumulated batches by epoch, if a callback changes it.

    Args:
        trainer: Resolved options of the Trainer, a mapping or a `Namespace`.
    """
    for callback in listed(trainer.get("callbacks")):
        path = callback if isinstance(callback, str) else callback["class_path"]
        options = {} if path is callback else callback.get("init_args") or {}
        if _is_a(path, GradientAccumulationScheduler) and "scheduling" in options:  # a subclass may have its own
            return {int(epoch): batches for epoch, batches in options["scheduling"].items()}
    return None


def weight_averaging(trainer: Any) -> dict[str, Any]:
    """Return the options of the callbacks that average weights, by class name, without the device of the averages."""
    averaging = {}
    for callback in listed(trainer.get("callbacks")):
        path = callback if isinstance(callback, str) else callback["class_path"]
        if path.endswith("WeightAveraging") or _is_a(path, WeightAveraging, StochasticWeightAveraging):
            options = {} if path is callback else callback.get("init_args") or {}
            averaging[path.rpartition(".")[2]] = {name: options[name] for name in options if name != "device"}
    return averaging


def _is_a(path: str, *kinds: type) -> bool:
    """Return whether a class path names one of the classes, or a subclass in a module that is already imported.

    A path in a checkpoint imports no module.
    """
    module, _, name = path.rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    return name in {kind.__name__ for kind in kinds} or (isinstance(found, type) and issubclass(found, kinds))


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    changes = differences(flat(_with_options(before, now)), flat(now))
    return [change for change in changes if not change.startswith((*IMPLEMENTATION, *NOT_COMPARED))]


def _with_options(before: Any, now: Any) -> Any:
    """Return ``before``, with each class name replaced by the mapping at its key of ``now`` if that has this class.

    A parser writes a default class as its name only. A command that reads the written configuration, such as `test`,
    turns the name into a mapping with the options of the class.
    """
    if isinstance(before, dict) and isinstance(now, dict):
        return {key: _with_options(value, now.get(key)) for key, value in before.items()}
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return [_with_options(*pair) for pair in zip(before, now, strict=True)]
    return now if isinstance(now, dict) and before is not None and now.get("class_path") == before else before
