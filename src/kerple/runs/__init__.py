"""The life of a run: its folders, atomic files, trust in checkpoints, signals, precision, and clusters."""
