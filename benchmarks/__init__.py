"""Benchmarks. The compared programs take turns in one run, and the ratios of their times are reported."""
