"""What every layer may use: errors, atomic writes, run folders, precision, the cluster, what may be read."""
