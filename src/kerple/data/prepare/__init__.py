"""Corpora to shards of tokens."""
