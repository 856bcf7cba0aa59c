"""The transformer: embedding, blocks, head."""
