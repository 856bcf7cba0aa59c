"""Benchmarks. Alternatives are timed in turn in one run, and their ratios are reported."""
