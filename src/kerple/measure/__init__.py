"""Measurements of a network, without Lightning: protocols, measures, results and runners."""
