"""`python run.py compare --config …`: strategies × seeds with everything else equal, and one report."""

from kerple.compare.command import main

__all__ = ["main"]
