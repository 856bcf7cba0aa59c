"""Preparation: it tokenises a corpus and writes the shards that `kerple.data` reads."""
