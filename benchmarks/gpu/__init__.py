"""Measurements on a GPU, each of at most ten minutes: ``python -m benchmarks.gpu``."""
