"""Preparation of a corpus: its tokenisation into the shards that `kerple.data` reads."""
