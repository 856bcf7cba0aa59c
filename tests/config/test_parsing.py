"""Switches, and options that were renamed."""

import pytest

from kerple.base.errors import UserError
from kerple.config.options import add_switch, command_parser, rename_options
from kerple.config.parsing import parse


@pytest.fixture
def parser():
    parser = command_parser("demo")
    parser.add_argument("--config", action="config")
    parser.add_argument("--output", type=str | None)
    add_switch(parser, "verify", True, "whether to verify")
    rename_options(parser, run_dir="output")
    rename_options(parser, " false", **{"no-verify": "verify"})
    return parser


@pytest.mark.parametrize(
    ("arguments", "value"),
    [([], True), (["--verify"], True), (["--verify", "true"], True), (["--verify=false"], False)],
)
def test_a_switch_is_true_or_false(parser, arguments, value):
    assert parse(parser, arguments).verify is value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--run_dir", "x"], "run_dir: this option is now --output"),
        (["--run_dir=x"], "run_dir: this option is now --output"),
        (["--no-verify"], "no-verify: this option is now --verify false"),
        (["--verify", "perhaps"], "verify: got perhaps, expected bool"),
    ],
)
def test_an_earlier_name_of_an_option_is_refused_with_its_present_name(parser, arguments, message):
    with pytest.raises(UserError) as error:
        parse(parser, arguments)
    assert str(error.value) == message


@pytest.mark.parametrize(("flags", "output"), [([], "old"), (["--output=new"], "new")])
def test_a_file_may_have_an_earlier_name(parser, flags, output):
    options = parse(parser, ["--config", "{run_dir: old}", *flags])
    assert options.output == output
    assert "run_dir" not in options
