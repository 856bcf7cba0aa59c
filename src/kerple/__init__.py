"""Length extrapolation of transformers: KERPLE and the field around it."""

__version__ = "0.2.0"
