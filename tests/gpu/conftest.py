"""Tests that need a GPU: ``make gpu``, or ``pytest -m gpu`` on a machine with one.

With KERPLE_DRY=1 they run on the CPU with small sizes, to find errors before they take time on a GPU.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

DRY = os.environ.get("KERPLE_DRY") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="there is no CUDA device; KERPLE_DRY=1 runs it on the CPU")
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.gpu)
            if not (DRY or torch.cuda.is_available()):
                item.add_marker(missing)


@contextmanager
def memory_below(limit: int, device: torch.device) -> Iterator[None]:
    """Context that may allocate at most ``limit`` bytes at once on a GPU. On a CPU nothing is checked."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield
    assert torch.cuda.max_memory_allocated() - before < limit


@pytest.fixture
def device() -> Iterator[torch.device]:
    """Device of the test: a GPU, or the CPU with KERPLE_DRY=1."""
    yield torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch._dynamo.reset()
