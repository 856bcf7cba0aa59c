"""Parsers of the command line that are built once for many tests."""

from typing import Any

import pytest

from kerple.cli.lightning import CLI


def build_parsers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the parser of fit, test and validate built for the first case only: it takes longer than a run of a step."""
    once: dict[type, tuple[Any, ...]] = {}
    build = CLI.setup_parser

    def setup_parser(self: CLI, *arguments: Any) -> None:
        if type(self) not in once:
            build(self, *arguments)
            once[type(self)] = self.parser, self._subcommand_parsers, self._subcommand_method_arguments
        self.parser, self._subcommand_parsers, self._subcommand_method_arguments = once[type(self)]

    monkeypatch.setattr(CLI, "setup_parser", setup_parser)
