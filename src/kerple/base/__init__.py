"""Functions for every layer: errors, files, folders of runs, precision, clusters, safe reading of checkpoints."""
