"""The data monitors of lightning-bolts, an optional dependency, made importable with Lightning 2.

lightning-bolts 0.7.0, its last release, requires pytorch-lightning < 2. With Lightning 2 the monitors lack only the
module `apply_func`, which Lightning has moved, and which is provided here under its old name. The packages that contain
the monitors import torchvision, which the monitors do not need. Therefore, empty modules replace these packages. The
empty modules have the search paths of the packages, but run none of their code.
"""

import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from lightning_utilities.core import apply_func

from kerple.base.errors import UserError

__all__ = ["ModuleDataMonitor", "TrainingDataMonitor"]

if "pl_bolts" not in sys.modules:
    spec = find_spec("pl_bolts")  # finds the package without importing it
    if spec is None or spec.origin is None:
        advice = "install it with `pip install --no-deps lightning-bolts==0.7.0`"
        raise UserError(f"trainer.callbacks: the data monitors need lightning-bolts; {advice}")
    for package in ("pl_bolts", "pl_bolts.utils", "pl_bolts.callbacks"):
        module = ModuleType(package)
        module.__path__ = [str(Path(spec.origin).parent.joinpath(*package.split(".")[1:]))]
        sys.modules[package] = module
    vars(sys.modules["pl_bolts.utils"])["_WANDB_AVAILABLE"] = False
    sys.modules.setdefault("pytorch_lightning.utilities.apply_func", apply_func)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from pl_bolts.callbacks.data_monitor import ModuleDataMonitor, TrainingDataMonitor
    from pl_bolts.utils.stability import UnderReviewWarning

# each use warns that the package is under review
warnings.filterwarnings("ignore", category=UnderReviewWarning)
