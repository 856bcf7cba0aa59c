"""What `run.py` imports before it knows which command is asked for, and what it says to an incomplete command line."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from kerple.cli.main import main
def refused(*commands):
    for arguments in commands:
        try:
            main(arguments)
        except SystemExit as end:
            assert end.code == 2
refused(["--help"], ["inspect", "no/such/folder"], ["prepare", "--config=none.yaml"], ["train"], [])
print(*{"torch", "pytorch_lightning", "matplotlib", "transformers"} & set(sys.modules))
refused(["fit", "--config", "configs/dmo.yaml"], ["fit", "--model.position", "KerplLog"])
print(*{"pytorch_lightning", "matplotlib", "transformers"} & set(sys.modules))
"""


def test_help_and_early_mistakes_import_no_torch_and_misspelt_names_no_lightning():
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, cwd=root)
    assert ended.stdout.endswith("\n\n\n")
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 6
    assert "configs/dmo.yaml" in errors[4]
    assert "KerplLog, expected a class path or one of ALiBi, " in errors[5]
