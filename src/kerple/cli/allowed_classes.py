"""The list of classes that a checkpoint may name when `test`, `validate` or `predict` build its model and data."""

import inspect
import sys
from importlib import import_module
from types import ModuleType

from pytorch_lightning import Callback, LightningDataModule
from pytorch_lightning import callbacks as lightning

import kerple.callbacks
import kerple.positions
import kerple.tasks
from kerple.base.errors import UserError
from kerple.base.trust import Offer
from kerple.data.datamodule import TokenShards
from kerple.tasks import Task, TaskData
from kerple.training.language_model import LanguageModel

# Lightning's callbacks whose options are numbers and names; others are offered by --trust pytorch_lightning
LIGHTNINGS = (
    lightning.DeviceStatsMonitor,
    lightning.EarlyStopping,
    lightning.LearningRateMonitor,
    lightning.ModelCheckpoint,
    lightning.ModelSummary,
    lightning.RichModelSummary,
    lightning.TQDMProgressBar,
    lightning.Timer,
)
try:
    from kerple.training.bolts import ModuleDataMonitor, TrainingDataMonitor

    BOLTS: tuple[type[Callback], ...] = (ModuleDataMonitor, TrainingDataMonitor)
except UserError:  # lightning-bolts is not installed
    BOLTS = ()
# old modules, which stored configurations and those of users may name; old options are in `kerple.base.compatibility`
RENAMED = {
    "kerple.callbacks.attention": "kerple.callbacks",
    "kerple.callbacks.checkpoints": "kerple.callbacks",
    "kerple.callbacks.kernels": "kerple.callbacks",
    "kerple.callbacks.progress": "kerple.callbacks",
    "kerple.tasks.data": "kerple.tasks",
    "kerple.positions.content": "kerple.positions",
    "kerple.positions.relative": "kerple.positions",
    "kerple.positions.row": "kerple.positions",
    "kerple.training.bolts": "pl_bolts.callbacks.data_monitor",
}


def offer(trust: tuple[str, ...] | None = None) -> Offer:
    """The offered classes: strategies, data, tasks and callbacks of this project, and some of Lightning's callbacks.

    Args:
        trust: Packages whose classes are offered too; None where the user cannot name any.
    """
    return Offer(
        model=LanguageModel,
        data=LightningDataModule,
        callback=Callback,
        classes={
            **kerple.positions.offered(),
            LightningDataModule: (TokenShards, TaskData),
            Task: _concrete(kerple.tasks, Task),
            Callback: _concrete(kerple.callbacks, Callback) + LIGHTNINGS + BOLTS,
        },
        renamed=RENAMED,
        places=frozenset({"cache", "cache_bytes", "dirpath", "keys"}),
        trust=None if trust is None else tuple(filter(None, trust)),
    )


def _concrete(module: ModuleType, base: type) -> tuple[type, ...]:
    found = [value for value in vars(module).values() if inspect.isclass(value) and issubclass(value, base)]
    return tuple(value for value in found if not inspect.isabstract(value) and value is not base)


def know_old_names() -> None:
    """Make old module names importable, so that the parser finds classes by them in any configuration."""
    for old, new in RENAMED.items():
        if old not in sys.modules:
            sys.modules[old] = import_module(new)
