"""The commands of `python run.py`, most of them in a module with the command's name, and modules that they share."""

import os.path
import sys

PROGRAM = {"kerple": "kerple", "__main__.py": "python -m kerple"}.get(os.path.basename(sys.argv[0]), "python run.py")
"""The program in usage lines, as the user called it."""
