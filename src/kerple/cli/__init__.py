"""The commands of `python run.py`."""
