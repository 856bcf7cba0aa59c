"""Errors of classes that options select: each becomes one line with the option and the message of the class."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from jsonargparse import ArgumentParser
from pytorch_lightning import Callback, LightningDataModule
from pytorch_lightning.loggers import Logger
from pytorch_lightning.profilers import Profiler
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from kerple.base.errors import UserError, compiler_error, describe, user_location

# classes of other packages that an option selects, with this option
OPTIONS: dict[type, str] = {
    Optimizer: "model.optimizer",
    LRScheduler: "model.schedule",
    Logger: "trainer.logger",
    Callback: "trainer.callbacks",
    Profiler: "trainer.profiler",
}
COMPILER = ("torch._dynamo", "torch._inductor", "torch._functorch")  # packages of `torch.compile`


def as_user_error(error: Exception) -> Exception:
    """Return an error as a UserError about the Trainer with its message. UserErrors and missing imports stay."""
    missing = isinstance(error, ModuleNotFoundError) and error.name  # Lightning's errors about packages have no name
    if isinstance(error, UserError) or missing:
        return error
    return foreign_error(error) or UserError(f"trainer: {error}")


def foreign_error(error: Exception) -> UserError | None:
    """Return an error in a class of another package as a UserError with the option, the class and its own message.

    Args:
        error: The error, with its traceback. The innermost call in this package, in torch.compile or in a method of one
            of the classes in `OPTIONS` determines the result.

    Returns:
        The UserError, or None if this call is in this package, because the error may then be a bug of this project.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]
    modules = [str(frame.f_globals.get("__name__")) for frame in frames]
    for module, owner in zip(modules, (type(frame.f_locals.get("self")) for frame in frames), strict=True):
        if f"{module}.".startswith("kerple.") or owner.__module__.startswith("kerple."):
            return None
        if module.startswith(COMPILER):
            caller = next((name for name in modules if name.startswith("kerple.")), "")
            return None if caller.startswith("kerple.attention") else compiler_error(error)
        if option := next((option for kind, option in OPTIONS.items() if issubclass(owner, kind)), None):
            return UserError(f"{option}: {owner.__name__}: {describe(error)}")
    return None


@contextmanager
def original_errors(parser: ArgumentParser) -> Iterator[None]:
    """Context in which an error of a class that the parser builds is raised as a UserError with only its own message.

    Outside this context, the parser raises an error with one message for each type that the option accepts.
    """
    mistakes: list[Exception] = []

    def build(kind, /, *args, **options):  # positional-only, because a class may have an option named kind
        try:
            return kind(*args, **options)
        except (UserError, MisconfigurationException, ModuleNotFoundError) as error:
            mistakes.append(error)
            raise
        except Exception as error:
            call = error.__traceback__
            if call and not call.tb_next:  # raised by the call above, as for an abstract class
                mistakes.append(UserError(f"{kind.__name__}: {error}"))
            elif foreign := foreign_error(error):
                mistakes.append(foreign)
            elif user_location(error):
                mistakes.append(UserError(describe(error)))
            raise

    # The parser uses the first instantiator that fits a class. If `LightningCLI` has added instantiators, that of the
    # model stays first, and `build` replaces that of the data. For `object`, `build` fits all remaining classes.
    for kind in (LightningDataModule, object):
        parser.add_instantiator(cast("Any", build), kind)
    try:
        yield
    except Exception as error:
        if not mistakes:
            raise
        raise as_user_error(mistakes[-1]) from error
