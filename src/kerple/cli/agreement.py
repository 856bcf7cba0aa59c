"""Check that a checkpoint belongs to a model, before its weights are loaded.

`kerple.base.training_state` checks the rest of it, the state of the training.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from kerple.base.compatibility import unread
from kerple.base.errors import UserError
from kerple.training.language_model import LanguageModel

# options that have to be equal, not only in the shapes they give, and what checkpoints without them had
ALWAYS = {"position": ""}
IN_TRAINING = dict.fromkeys(("lr", "betas", "adam_eps", "weight_decay", "warmup")) | {"optimizer": "adamw"}
TO_RESUME = ("state_dict", "optimizer_states", "lr_schedulers", "loops", "callbacks", "global_step", "epoch")


def agree(path: str | Path, content: dict[str, Any], model: LanguageModel, resume: int | None = None) -> None:
    """Check that a checkpoint has the model's strategy, and parameters of the same names and shapes.

    Options of a strategy that have no effect on parameters may differ.

    Args:
        path: Path of the checkpoint, for messages.
        content: Content of the checkpoint, as `kerple.base.trust.check` returns it.
        model: The model of the configuration.
        resume: If its training continues, the number of steps it is to have in all. The checkpoint then needs the state
            of loops and optimiser too, and the same options of optimiser and schedule, because its state has these.

    Raises:
        UserError: If the checkpoint does not belong to the model; the message names the options that differ.
    """
    if missing := [key for key in (TO_RESUME if resume is not None else TO_RESUME[:1]) if key not in content]:
        raise UserError(
            f"ckpt_path: {path} has no {', '.join(missing)}; expected a checkpoint written by `python run.py fit`"
        )
    weights, own = content["state_dict"], model.state_dict()
    shapes = dict(weights) if isinstance(weights, dict) else {}
    for name in unread(shapes, own):
        del shapes[name]
    fits = shapes.keys() == own.keys() and all(_alike(shapes[name], own[name]) for name in own)
    before, now = content.get("hyper_parameters"), dict(model.hparams)
    # only a model that the command line has built has its options in the form of the checkpoint
    before = before if isinstance(before, dict) and isinstance(now.get("position"), dict) else {}
    must = ALWAYS | (IN_TRAINING if resume is not None else {})
    if fits and all(_told(before, key, old) == _told(now, key, old) for key, old in must.items() if key in before):
        if resume is not None:
            _agree_on_steps(path, content["lr_schedulers"], model.schedule(resume)[1], resume)
        return
    differing = [
        key
        for key in sorted(before.keys() & now.keys())
        if _told(before, key, "") != _told(now, key, "") and not key.startswith("_")
    ]
    told = [f"model.{key}: got {_told(now, key, '')}, the checkpoint has {_told(before, key, '')}" for key in differing]
    if not told:
        names = sorted(name for name in shapes.keys() | own.keys() if not _alike(shapes.get(name), own.get(name)))
        told = [f"its parameters are others, such as {names[0]}"]
    kind = "training" if differing and IN_TRAINING.keys() >= set(differing) else "model"
    raise UserError(f"ckpt_path: {path} is of another {kind}: {'; '.join(told)}; use the options it has")


def _agree_on_steps(path: str | Path, schedules: Any, last: int, steps: int) -> None:
    """Check that the schedule of the learning rate in a checkpoint ends where that of so many steps does."""
    first = schedules[0] if isinstance(schedules, list) and schedules else None
    known = first.get("end") if isinstance(first, dict) else None
    if isinstance(known, int) and known != last:
        raise UserError(
            f"trainer.max_steps: got {steps}, but the learning rate in {path} falls to 0 at step {known}; give that "
            f"number, or start a new training from its weights with --weights {path}"
        )


def stored_length(content: dict[str, Any]) -> int | None:
    """The training length in a checkpoint, or None if it has none."""
    options = content.get("hyper_parameters")
    length = options.get("length") if isinstance(options, dict) else None
    return length if isinstance(length, int) and length > 0 else None


def _alike(one: Any, other: Any) -> bool:
    return isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape


def _told(options: dict[str, Any], key: str, missing: Any) -> Any:
    """The value of an option; of a class only its name and the names of the classes among its options."""
    value = options.get(key, missing)
    value = tuple(value) if isinstance(value, list) else value
    return " of ".join(_names(value)) if isinstance(value, dict) else value


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "class_path" in value:
            yield str(value["class_path"]).rpartition(".")[2]
        for inner in value.values():
            yield from _names(inner)
