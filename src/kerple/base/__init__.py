"""Functions that all other packages use: errors, files, folders of runs, precision, safe reading of checkpoints."""
