"""Check that a checkpoint belongs to a model, before its weights are loaded.

`kerple.runs.training_state` checks the rest of it, the state of the training.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from kerple.errors import UserError
from kerple.lm import LanguageModel

TO_RESUME = ("state_dict", "optimizer_states", "lr_schedulers", "loops", "callbacks", "global_step", "epoch")


def agree(path: str | Path, content: dict[str, Any], model: LanguageModel, resume: bool) -> None:
    """Check that a checkpoint has the model's strategy, and parameters of the same names and shapes.

    Options of a strategy that have no effect on parameters may differ.

    Args:
        path: Path of the checkpoint, for messages.
        content: Content of the checkpoint, as `kerple.runs.trust.check` returns it.
        model: The model of the configuration.
        resume: Whether its training continues; the checkpoint then needs the state of loops and optimiser too.

    Raises:
        UserError: If the checkpoint does not belong to the model; the message names the options that differ.
    """
    if missing := [key for key in (TO_RESUME if resume else TO_RESUME[:1]) if key not in content]:
        raise UserError(
            f"ckpt_path: {path} has no {', '.join(missing)}; expected a checkpoint written by `python run.py fit`"
        )
    weights, own = content["state_dict"], model.state_dict()
    shapes = weights if isinstance(weights, dict) else {}
    fits = shapes.keys() == own.keys() and all(_alike(shapes[name], own[name]) for name in own)
    before, now = content.get("hyper_parameters"), dict(model.hparams)
    # only a model that the command line has built has its options in the form of the checkpoint
    before = before if isinstance(before, dict) and isinstance(now.get("position"), dict) else {}
    must = {"position": "", "optimizer": "adamw"} if resume else {"position": ""}  # equal, not only in shape
    if fits and all(_told(before, key, old) == _told(now, key, old) for key, old in must.items() if key in before):
        return
    told = [
        f"model.{key}: got {_told(now, key, '')}, the checkpoint has {_told(before, key, '')}"
        for key in before.keys() & now.keys()
        if _told(before, key, "") != _told(now, key, "") and not key.startswith("_")
    ]
    if not told:
        names = sorted(name for name in shapes.keys() | own.keys() if not _alike(shapes.get(name), own.get(name)))
        told = [f"its parameters are others, such as {names[0]}"]
    raise UserError(f"ckpt_path: {path} is of another model: {'; '.join(sorted(told))}; use the options it has")


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
    return " of ".join(_names(value)) if isinstance(value, dict) else value


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "class_path" in value:
            yield str(value["class_path"]).rpartition(".")[2]
        for inner in value.values():
            yield from _names(inner)
