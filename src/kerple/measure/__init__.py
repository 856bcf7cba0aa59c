"""Measurements of a network, which need no Lightning: protocols, measures, results and where they run."""
