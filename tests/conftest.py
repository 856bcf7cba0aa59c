import logging
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from kerple.model import Transformer
from kerple.positions import Shape, strategies

# transformers copies the code of models into this folder, and imports it from there
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp()
# matplotlib keeps its list of fonts, which takes seconds to make, and only our notes are in a temporary folder
os.environ.setdefault("MPLCONFIGDIR", os.path.expanduser("~/.cache/matplotlib"))
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
# the compiler's cache does not distinguish the instruction set that this variable limits, and its code would be wrong
if "ATEN_CPU_CAPABILITY" in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
# Tests of hypothesis use the same examples in each run. The slow fuzz test uses new ones.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")


# Folders whose tests compare numbers, and files in them without the marker `numbers`. `make test-numbers` runs the
# marked tests twice. The files take more than half of the time: they test compiled kernels, properties of every
# strategy, and whole analyses and processes. `ATEN_CPU_CAPABILITY=avx2 make test` runs all of them.
NUMBERS = {Path(__file__).with_name(name) for name in ("attention", "positions", "model", "measure")}
NOT_NUMBERS = {"test_flex_on_cpu.py", "test_kernels_ahead.py", "test_properties.py"}
NOT_NUMBERS |= {"test_analyses.py", "test_text_and_runner.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if NUMBERS & set(item.path.parents) and item.path.name not in NOT_NUMBERS:
            item.add_marker("numbers")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_handler_of_an_earlier_test() -> None:
    """A handler of an earlier test would write a traceback to the errors of this test, as its stream is closed."""
    logging.getLogger("kerple").handlers.clear()


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the figures out of reports, because drawing takes most of the time of a report."""
    monkeypatch.setattr("kerple.compare.comparison_report.write_figures", lambda *_: None)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of thirty short documents."""
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(30):
        (folder / f"{i}.txt").write_text(f"döcument {i}: " + "what was far is near. " * 8)
    return folder


@pytest.fixture
def tiny_network() -> Callable[..., Transformer]:
    """Function that builds a network: two layers, width 32, 4 heads, training length 32, 50 token ids; eval mode, fp32.

    Its weights are ten times the usual initial weights, with which attention is almost uniform and hides errors.
    """

    def build(name: str, length: int = 32, **options: object) -> Transformer:
        network = Transformer(Shape(32, 4, length), 2, 50, partial(strategies()[name], **options)).eval()
        with torch.no_grad():
            for module in network.modules():
                if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                    module.weight.normal_(std=0.2)
        return network

    return build
