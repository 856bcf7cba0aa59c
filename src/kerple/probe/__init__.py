"""What the positions of a model really do: configuration, measurement at the attention call, and invariances."""
