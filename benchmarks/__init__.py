"""Measurements: ratios of things timed side by side in one run, with a verdict against a target and a JSON record."""
