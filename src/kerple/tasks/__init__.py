"""Algorithmic tasks: problems of any length, drawn on the fly; short ones for training, longer ones for testing."""

from kerple.tasks.arithmetic import Addition, ModularSum, Multiplication, Parity, Polynomial
from kerple.tasks.base import Example, Task
from kerple.tasks.datamodule import TaskData
from kerple.tasks.retrieval import AssociativeRecall, Needle, Passkey, VariableChain
from kerple.tasks.sequences import Copy, Reverse, Sort

__all__ = [
    "Addition",
    "AssociativeRecall",
    "Copy",
    "Example",
    "ModularSum",
    "Multiplication",
    "Needle",
    "Parity",
    "Passkey",
    "Polynomial",
    "Reverse",
    "Sort",
    "Task",
    "TaskData",
    "VariableChain",
]
