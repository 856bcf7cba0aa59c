"""Lightning callbacks: they measure, save and watch a run. The command line knows those of the list below by name."""

from kerple.callbacks.analysis import Analysis
from kerple.callbacks.dashboards import Dashboards
from kerple.callbacks.extrapolation import Extrapolation
from kerple.callbacks.heads import AttentionMaps, AttentionStatistics
from kerple.callbacks.health import Finite
from kerple.callbacks.kernel_curves import Kernels
from kerple.callbacks.key_perplexity import LongPerplexity
from kerple.callbacks.last_checkpoint import LastCheckpoint
from kerple.callbacks.needle import Needle
from kerple.callbacks.position_wise import PositionWisePerplexity
from kerple.callbacks.progress_bar import SteadyProgress
from kerple.callbacks.progress_lines import ProgressLines
from kerple.callbacks.provenance import Provenance
from kerple.callbacks.random_state import RandomState
from kerple.callbacks.receptive_field import ReceptiveField
from kerple.callbacks.shift import ShiftTest
from kerple.callbacks.task_accuracy import TaskAccuracy
from kerple.callbacks.terms import FourTerms
from kerple.callbacks.throughput import Throughput

__all__ = [
    "Analysis",
    "AttentionMaps",
    "AttentionStatistics",
    "Dashboards",
    "Extrapolation",
    "Finite",
    "FourTerms",
    "Kernels",
    "LastCheckpoint",
    "LongPerplexity",
    "Needle",
    "PositionWisePerplexity",
    "ProgressLines",
    "Provenance",
    "RandomState",
    "ReceptiveField",
    "ShiftTest",
    "SteadyProgress",
    "TaskAccuracy",
    "Throughput",
]
