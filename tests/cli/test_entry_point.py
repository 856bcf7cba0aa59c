"""What `run.py` imports before it knows which command is asked for, and what it says to an incomplete command line."""

import json
import subprocess
import sys
from pathlib import Path

from kerple.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "pytorch_lightning", "pandas", "matplotlib", "transformers")
PROGRAM = """
import json, sys
from kerple.cli.main import main
statuses = []
for arguments in COMMANDS:
    print("|", end="", file=sys.stderr)
    try:
        main(arguments)
        statuses.append(0)
    except SystemExit as end:
        statuses.append(end.code)
print("|" + json.dumps([statuses, [name for name in HEAVY if name in sys.modules]]))
"""


def run(*commands: list[str]) -> tuple[list[int], set[str], str]:
    """Statuses of commands in one new process, which of the heavy packages they imported, what they printed."""
    program = f"COMMANDS, HEAVY = {commands!r}, {HEAVY!r}\n{PROGRAM}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    statuses, names = json.loads(done.stdout.rpartition("|")[2])
    return statuses, set(names), done.stdout + done.stderr


def test_help_and_early_mistakes_import_no_torch():
    mistakes = [["inspect", "no/such/folder"], ["train"], []]
    statuses, imported, printed = run(["--help"], *mistakes)
    assert (statuses, imported) == ([0] + [2] * len(mistakes), set())
    assert all(f"\n  {name} " in printed for name in COMMANDS)
    assert printed.count("error: ") == len(mistakes)
