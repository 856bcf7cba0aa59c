"""Builds the parser of `fit` once in the process that forks fits."""

import pytest
from jsonargparse import capture_parser

import tests.parsers  # noqa: F401
from kerple.cli import lightning_commands

with pytest.MonkeyPatch.context() as patch:
    patch.setattr(lightning_commands, "configure_torch", lambda: None)  # threads do not survive a fork
    capture_parser(lambda: lightning_commands.run(["fit"], ""))
