"""The commands of `python run.py`: each is a module, and the others are their parts."""
