"""What is measured on a GPU, in pieces of at most ten minutes: ``python -m benchmarks.gpu``."""
