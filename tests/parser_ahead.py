"""Builds the parser of `fit` once in the process that forks fits."""

import pytest
from jsonargparse import capture_parser

import tests.parsers  # noqa: F401
from kerple.cli import fit_and_test

with pytest.MonkeyPatch.context() as patch:
    patch.setattr(fit_and_test, "configure_torch", lambda: None)  # threads do not survive a fork
    capture_parser(lambda: fit_and_test.run(["fit"], ""))
