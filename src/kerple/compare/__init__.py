"""Comparison of strategies × seeds with everything else equal: its description, its runs, its records."""
