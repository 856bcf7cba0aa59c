"""Lightning callbacks: they measure, save and watch a run. The command line knows those of the list below by name."""

from kerple.analyses.attention_maps import AttentionMaps, AttentionStatistics
from kerple.analyses.four_terms import FourTerms
from kerple.analyses.kernels import Kernels
from kerple.analyses.long_perplexity import LongPerplexity
from kerple.analyses.needle import Needle
from kerple.analyses.position_wise import PositionWisePerplexity
from kerple.analyses.receptive_field import ReceptiveField
from kerple.analyses.shift import ShiftTest
from kerple.evaluation.analysis import Analysis
from kerple.evaluation.extrapolation import Extrapolation
from kerple.evaluation.progress_lines import ProgressLines
from kerple.tasks.accuracy import TaskAccuracy
from kerple.training.dashboards import Dashboards
from kerple.training.health import Finite
from kerple.training.last_checkpoint import LastCheckpoint
from kerple.training.progress_bar import SteadyProgress
from kerple.training.provenance import Provenance
from kerple.training.random_state import RandomState
from kerple.training.throughput import Throughput

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
