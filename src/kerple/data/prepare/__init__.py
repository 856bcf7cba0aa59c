"""Preparation of a corpus: reads its documents, tokenises them, and writes the shards that `kerple.data` reads."""
