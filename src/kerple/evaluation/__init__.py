"""Protocols, metrics, statistics and reports."""
