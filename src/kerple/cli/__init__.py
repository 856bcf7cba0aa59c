"""The commands of `python run.py`, most of them in a module with the command's name, and modules that they share."""
