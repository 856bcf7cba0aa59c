"""The classes that a checkpoint may name when a command builds its model and data."""

from pytorch_lightning import Callback, LightningDataModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import kerple.data.datamodule  # noqa: F401 -- defines data modules
from kerple.config.options import import_modules, subclasses
from kerple.config.untrusted_checkpoints import Classes
from kerple.measure.measure import Measure
from kerple.positions import Position
from kerple.tasks import Task
from kerple.training.language_model import LanguageModel


def import_classes() -> None:
    """Import all modules that define measures and callbacks, so that options may name their classes."""
    for package in ("kerple.measure", "kerple.training"):  # not at import, because modules of training import this one
        import_modules(package)


def allowed_classes(trust: str = "") -> Classes:
    """Return the classes that a checkpoint may name.

    They are the strategies, tasks, data modules, measures and callbacks of this project, the optimisers and schedules
    of torch, and the classes of trusted packages.

    Args:
        trust: Further packages and URLs that the user trusts, separated by commas.
    """
    import_classes()
    bases: tuple[type, ...] = (Position, Task, LightningDataModule, Callback, Measure, Optimizer, LRScheduler)
    kinds = [kind for base in bases for kind in subclasses(base) if kind.__module__.startswith(("kerple.", "torch."))]
    return Classes(kinds, tuple(filter(None, trust.split(","))), LanguageModel)
