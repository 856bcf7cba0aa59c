"""Imported by the process that forks fits: the parser of `fit` is built there, once for all of them."""

import pytest
from jsonargparse import capture_parser

import tests.parsers  # noqa: F401
from kerple.cli import fit

with pytest.MonkeyPatch.context() as patch:
    patch.setattr(fit, "configure_torch", lambda: None)  # its threads would not outlive a fork
    capture_parser(lambda: fit.run(["fit"], ""))
