"""Algorithmic tasks: random problems of any length, short for training and longer for tests."""

from kerple.tasks.arithmetic import Addition, ModularSum, Multiplication, Parity, Polynomial
from kerple.tasks.retrieval import AssociativeRecall, NeedleInFiller, Passkey, VariableChain
from kerple.tasks.sequences import Copy, Reverse, Sort
from kerple.tasks.task import Example, Task
from kerple.tasks.task_data import TaskData

__all__ = [
    "Addition",
    "AssociativeRecall",
    "Copy",
    "Example",
    "ModularSum",
    "Multiplication",
    "NeedleInFiller",
    "Parity",
    "Passkey",
    "Polynomial",
    "Reverse",
    "Sort",
    "Task",
    "TaskData",
    "VariableChain",
]
