"""Evaluation: protocols, metrics, analyses of a network, and rows of results. Nothing here depends on Lightning."""
