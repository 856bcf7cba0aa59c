"""Imported by the process that forks fits: the parser of `fit` is built there, once for all of them."""

import pytest
from jsonargparse import capture_parser

from kerple.cli import fit
from tests.parsers import build_parsers_once

build_parsers_once(pytest.MonkeyPatch())
with pytest.MonkeyPatch.context() as patch:
    patch.setattr(fit, "configure_torch", lambda: None)  # its threads would not outlive a fork
    capture_parser(lambda: fit.run(["fit"], ""))
