"""Comparison of a checkpoint's configuration with that of the command, before a test or a resumed training."""

from pathlib import Path
from typing import Any

from pytorch_lightning import LightningModule

from kerple.base.errors import UserError
from kerple.base.trust import CONFIG
from kerple.compare.configuration import differences, flat

SAMPLES_PER_STEP = "samples_per_step"  # key in a checkpoint: samples of all devices and micro-batches of a step
FREE = ("model.compile", "model.attention")  # they may differ: they change how numbers are computed, not which
# what changes the order of the training samples, or the learning rates that the state in the checkpoint has
DATA = ("seed", "length", "samples", "sections", "examples", "mixture", "train_length", "held_out", "task")
SAME = (
    "seed_everything",
    "model.",
    "trainer.max_steps",
    "data.class_path",
    *(f"data.init_args.{name}" for name in DATA),
)
OF_A_FOLDER = ("run_dir", "logs", "experiment", "ckpt_path", "config", "trust")  # where a run is
OF_A_START = (*OF_A_FOLDER, "weights", "weights_only", "trainer.default_root_dir", "trainer.callbacks")


def check_tested_model(path: str, content: dict[str, Any], config: dict[str, Any], model: LightningModule) -> None:
    """Check that a test is of the checkpoint's model; its strategy alone may be another, one that needs no new weights.

    Args:
        path: Path of the checkpoint, for messages.
        content: The loaded checkpoint.
        config: The configuration of the command, nested.
        model: The model that was built from it.

    Raises:
        UserError: The architecture is another, or the strategy has parameters that the checkpoint lacks.
    """
    changes = _changes({"model": content[CONFIG]["model"]}, {"model": config["model"]})
    if others := [change for change in changes if not change.startswith("model.position.")]:
        raise UserError(f"{'; '.join(others)}: the architecture is that of {path}; leave these options out")
    check_weights(path, content, model, other_strategy=bool(changes))
    if changes:
        model.strict_loading = False  # weights of the strategy that is replaced are left out
        print(f"tested with another strategy than {path}: {'; '.join(changes)}", flush=True)


def check_weights(path: str, content: dict[str, Any], model: LightningModule, other_strategy: bool = False) -> None:
    """Check that a checkpoint has the model's weights, and no others unless the strategy is another.

    Raises:
        UserError: A weight is missing, has another shape or belongs to no part of the model.
    """
    weights, expected = content.get("state_dict", {}), model.state_dict()
    odd = [name for name, value in expected.items() if getattr(weights.get(name), "shape", None) != value.shape]
    odd += [] if other_strategy else [name for name in weights if name not in expected]
    if odd:
        raise UserError(f"ckpt_path: {path} has other weights than the model needs, such as {odd[0]}")


def check_resumption(path: str | Path, content: dict[str, Any], config: dict[str, Any], samples: int | None) -> None:
    """Check that a resumed training continues as it began; print the differences that are harmless.

    Args:
        path: Path of the checkpoint, for messages.
        content: The loaded checkpoint.
        config: The configuration of the command, nested.
        samples: Samples of a step over all devices, or None if the data does not say.

    Raises:
        UserError: The seed, the length, the order of the data, the samples of a step, the model, its optimiser or the
            number of steps is another, or a run without shards is to go on with them.
    """
    changes = _changes(content[CONFIG], config)
    refused = [change for change in changes if change.startswith(SAME)]
    before = content.get(SAMPLES_PER_STEP)
    if samples is not None and before is not None and samples != before:
        refused.append(f"samples of a step over all devices: {before} -> {samples}")
    # with shards, Lightning numbers the optimiser's moments by the order of the model, and reads no other order
    if ["ShardedBlocks" in str(each["trainer"]["strategy"]) for each in (content[CONFIG], config)] == [False, True]:
        refused.append("trainer.strategy: without shards -> with shards")
    if refused:
        raise UserError(
            f"ckpt_path: {path} is of another training: {'; '.join(refused)}; give the earlier options, or start a "
            f"new training from its weights with --weights {path}"
        )
    if changes:
        print(f"resumed with other options than before: {'; '.join(changes)}", flush=True)


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    changes = differences(flat(_with_options(before, now)), flat(now))
    return [change for change in changes if not change.startswith((*FREE, *OF_A_START))]


def _with_options(before: Any, now: Any) -> Any:
    """The configuration, with the default options of classes that are only named, as a parser writes defaults once."""
    if isinstance(before, dict) and isinstance(now, dict):
        return {key: _with_options(value, now.get(key)) for key, value in before.items()}
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return [_with_options(*pair) for pair in zip(before, now, strict=True)]
    return now if isinstance(now, dict) and before is not None and now.get("class_path") == before else before
