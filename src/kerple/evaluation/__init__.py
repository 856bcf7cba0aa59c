"""Evaluation: protocols, metrics, analyses of a network, and rows of results. `protocols` and `segments` need
torch alone; `analysis`, `extrapolation`, `typed` and `progress_lines` are for Lightning's Trainer."""
