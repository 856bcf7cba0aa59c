"""Commands that a fit names in its output: those that test and continue it."""

import shlex
from contextlib import suppress
from pathlib import Path

from kerple.base.errors import UserError
from kerple.base.run_folder import is_locked
from kerple.config import PROGRAM
from kerple.config.files import read_mapping
from kerple.config.flat_configuration import flat
from kerple.config.untrusted_checkpoints import CONFIG, load
from kerple.config.user_code_digests import trust_option
from kerple.training.trainer import print_once


def test_command(last: Path) -> str:
    """Return the command that tests the last checkpoint of a fit, and trusts the user's classes and URLs."""
    trust = trust_option(flat(load(last, "meta")[CONFIG]))
    return f"{PROGRAM} {shlex.join(['test', '--ckpt_path', str(last), *trust])}"


def resume_command(last: Path) -> str:
    """Return the command that continues a fit from its last checkpoint, with the options of the checkpoint.

    They are in the file of the session that wrote the checkpoint: ``config.yaml``, or that of a resumption.
    """
    folder, config = last.parents[1], load(last, "meta")[CONFIG]
    resumed = [path for path in folder.glob("config-resumed-*.yaml") if read_mapping(path) == config]
    options = ["--config", str((resumed or [folder / "config.yaml"])[0]), "--ckpt_path", str(last)]
    return f"{PROGRAM} {shlex.join(['fit', *options])}"


def mention_earlier_fit(last: Path) -> None:
    """Print how to continue the fit with this last checkpoint, unless it runs or has made all its steps."""
    with suppress(UserError, LookupError, TypeError):  # the checkpoint is damaged, but this run does not need it
        content = load(last, "meta")
        step, steps = content["global_step"], content[CONFIG]["trainer"]["max_steps"]
        if not 0 <= steps <= step and not is_locked(last.parents[1]):
            # without max_steps it is not known whether the fit was stopped
            state = f"was stopped at step {step:,} of {steps:,}" if steps >= 0 else f"has reached step {step:,}"
            earlier = f"{last.parents[1]} has a fit that {state}"
            print_once(f"{earlier}. This is a new fit; to continue that one: {resume_command(last)}")
