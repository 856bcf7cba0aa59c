"""Length extrapolation of transformers: KERPLE and other positional strategies."""

import os

__version__ = "0.2.0"

if os.name == "nt":
    raise ImportError("kerple needs locks and signals of Linux or macOS; on Windows, use WSL")
