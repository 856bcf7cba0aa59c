"""What `run.py` imports before it knows which command is asked for, and what it says to an incomplete command line."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from kerple.cli.main import main
for arguments in (["--help"], ["inspect", "no/such/folder"], ["prepare", "--config=none.yaml"], ["train"], []):
    try:
        main(arguments)
    except SystemExit as end:
        assert end.code == 2
print(*{"torch", "pytorch_lightning", "matplotlib", "transformers"} & set(sys.modules))
"""


def test_help_and_early_mistakes_and_the_commands_of_shards_import_no_torch():
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, cwd=root)
    assert ended.stdout.endswith("\n\n")
    assert ended.stderr.count("error: ") == 4
