"""Options and configurations: parsing, comparison, agreement with a checkpoint, and reading of untrusted files."""

import os.path
import sys

PROGRAM = {"kerple": "kerple", "__main__.py": "python -m kerple"}.get(os.path.basename(sys.argv[0]), "python run.py")
"""The program in usage lines, as the user called it."""
DESCRIPTION = "Length extrapolation of transformers."
