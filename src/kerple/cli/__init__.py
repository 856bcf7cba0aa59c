"""The commands of `python run.py`: each is a module, and the others are their parts."""

import os.path
import sys

PROGRAM = {"kerple": "kerple", "__main__.py": "python -m kerple"}.get(os.path.basename(sys.argv[0]), "python run.py")
"""The program as it was called, for usage lines."""
