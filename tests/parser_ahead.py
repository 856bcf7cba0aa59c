"""Builds the parser of `fit` once in the process that forks fits."""

import pytest
from jsonargparse import capture_parser

import tests.parsers  # noqa: F401
from kerple.cli import lightning

with pytest.MonkeyPatch.context() as patch:
    patch.setattr(lightning, "configure_torch", lambda: None)  # threads do not survive a fork
    capture_parser(lambda: lightning.run(["fit"]))
