"""Options of all commands: the same thing has the same name and the same help."""

import argparse
from collections import defaultdict
from importlib import import_module

import pytest
from jsonargparse import ArgumentParser, capture_parser
from jsonargparse._actions import _ActionConfigLoad

from kerple.cli.main import MODULES
from kerple.config.options import RenamedOption, add_folder_arguments

COMMANDS = ("prepare", "compare", "predict", "plan", "inspect", "check", "measure_pretrained")
COMMANDS += ("probe", "parity", "extend", "export")
# options with one meaning, about which each command says more, and words that each help contains
SPECIFIC = {"length": "tokens", "output": "folder", "config": "file", "model": "model to "}
SPECIFIC |= {"name": "title of the report", "test_folder": "name of the folder", "text": "data.corpus"}
FORMER = {"run_dir", "to", "tokens", "no-verify"}


@pytest.fixture
def options(monkeypatch):
    """The options of each command except those of sections: (command, name) -> argparse's action."""
    plan = import_module("kerple.cli.plan")
    monkeypatch.setattr(plan, "fit_parser", lambda: ArgumentParser(exit_on_error=False))  # the real one takes seconds
    parsers = {"fit": ArgumentParser()}
    add_folder_arguments(parsers["fit"], "run", "test")
    for command in COMMANDS:
        module = import_module(f"kerple.cli.{MODULES.get(command, command)}")
        parsers[command] = capture_parser(lambda module=module: module.main([]))
    directories = capture_parser(lambda: import_module("kerple.cli.compare").main(["--directories=x"]))
    return {
        (command, action.dest): action
        for command, parser in (parsers | {"compare --directories": directories}).items()
        for action in parser._actions
        if "." not in action.dest and not isinstance(action, RenamedOption | _ActionConfigLoad)
    }


def test_options_of_all_commands(options):
    helps, names, problems = defaultdict(set), defaultdict(set), []
    for (command, name), action in options.items():
        spellings = {string.removesuffix("+") for string in action.option_strings if string.startswith("--")}
        text = str(action.help)
        wrong = {
            "is the former name of an option": name in FORMER,
            "is a switch, which is --name true": isinstance(action, argparse._StoreTrueAction),
            "has a second spelling, or a hyphen": not spellings <= {f"--{name}"},
            f"does not say {SPECIFIC.get(name)}": SPECIFIC.get(name, "") not in text.lower(),
        }
        problems += [f"{command} --{name} {what}" for what, is_so in wrong.items() if is_so]
        if name not in SPECIFIC:
            helps[name].add(text)
        names[text].add(name)
    problems += [f"one help for several options: {several}" for several in names.values() if len(several) > 1]
    problems += [f"--{name}: several helps: {several}" for name, several in helps.items() if len(several) > 1]
    assert not problems, "\n".join(problems)
