"""Analyses of a trained model, one file each."""
