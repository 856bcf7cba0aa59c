"""Functions that all other packages use: errors, files, folders of runs, progress, processor cores."""
