"""What a checkpoint may name, when `test`, `validate` or `predict` set up what it was trained with."""

import inspect
import sys
from importlib import import_module
from types import ModuleType

from pytorch_lightning import Callback, LightningDataModule
from pytorch_lightning import callbacks as lightning

import kerple.bolts
import kerple.callbacks
import kerple.positions
import kerple.tasks
from kerple.data.datamodule import TokenShards
from kerple.lm import LanguageModel
from kerple.runs.trust import Offer
from kerple.tasks import Task, TaskData

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
BOLTS = (kerple.bolts.ModuleDataMonitor, kerple.bolts.TrainingDataMonitor)
# modules of earlier versions: stored configurations and users' own name classes by them
RENAMED = {
    "kerple.callbacks.attention": "kerple.callbacks",
    "kerple.callbacks.checkpoints": "kerple.callbacks",
    "kerple.callbacks.kernels": "kerple.callbacks",
    "kerple.callbacks.progress": "kerple.callbacks",
    "kerple.tasks.data": "kerple.tasks",
    "kerple.positions.content": "kerple.positions",
    "kerple.positions.relative": "kerple.positions",
    "kerple.bolts": "pl_bolts.callbacks.data_monitor",
}


def offer(trust: tuple[str, ...] = ()) -> Offer:
    """The strategies, data modules, tasks and callbacks of this project, and some of Lightning's callbacks."""
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
        trust=tuple(filter(None, trust)),
    )


def _concrete(module: ModuleType, base: type) -> tuple[type, ...]:
    found = [value for value in vars(module).values() if inspect.isclass(value) and issubclass(value, base)]
    return tuple(value for value in found if not inspect.isabstract(value) and value is not base)


def know_old_names() -> None:
    """Have the parser find classes by the modules of earlier versions, in a user's configuration too."""
    for old, new in RENAMED.items():
        if old not in sys.modules:
            sys.modules[old] = import_module(new)
