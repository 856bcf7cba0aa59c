"""Length extrapolation of transformers: KERPLE and the field around it."""
