"""The commands of `python run.py`, each a module of the same name, and modules that they share."""

import os.path
import sys

PROGRAM = {"kerple": "kerple", "__main__.py": "python -m kerple"}.get(os.path.basename(sys.argv[0]), "python run.py")
"""Name of the program in usage lines, as the user called it."""
