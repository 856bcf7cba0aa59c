"""Makes `CLI` build its parser only once in all tests, because building takes longer than a run of one step."""

from typing import Any

from kerple.cli.lightning import CLI

ONCE: dict[type, tuple[Any, ...]] = {}
BUILD = CLI.setup_parser


def setup_parser(self: CLI, *arguments: Any) -> None:
    if type(self) not in ONCE:
        BUILD(self, *arguments)
        ONCE[type(self)] = self.parser, self._subcommand_parsers, self._subcommand_method_arguments
    self.parser, self._subcommand_parsers, self._subcommand_method_arguments = ONCE[type(self)]


CLI.setup_parser = setup_parser
