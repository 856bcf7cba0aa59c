"""Comparison of a model's positions with its configuration, and tests of the invariances of its logits."""
