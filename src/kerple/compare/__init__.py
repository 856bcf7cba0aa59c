"""Strategies × seeds with everything else equal: what is compared, and how its runs are run."""
