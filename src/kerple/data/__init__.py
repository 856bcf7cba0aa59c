"""Tokenised corpora as shards, and the order in which they are read."""
