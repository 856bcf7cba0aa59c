"""What every layer may use: errors, atomic writes, folders of runs, precision, cluster, safe reading of checkpoints."""
