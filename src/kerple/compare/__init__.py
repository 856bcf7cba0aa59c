"""Comparison of strategies × seeds that share all other options: description, runs, records, statistics, report."""
