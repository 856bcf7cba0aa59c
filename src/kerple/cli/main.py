"""The entry point of `python run.py` and `kerple`. The module of a command is imported when the command is called."""

import io
import locale
import os
import sys
import threading
from argparse import ArgumentError
from contextlib import suppress
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from kerple.base.errors import UserError, describe, machine_error, require, unknown, user_location
from kerple.base.processor_cores import measure_load
from kerple.base.run_folder import unlock
from kerple.config import DESCRIPTION, PROGRAM
from kerple.config.files import FILE_OPTIONS, read_mapping, with_shipped_configs

DEMO = ["compare", "--config", "configs/compare/demo.yaml", "--parallel", "2"]
COMMANDS = {
    "demo": "train four models, one per positional strategy, in minutes, and compare them beyond the training length",
    "prepare": "build the token shards of a configuration",
    "fit": "train a model",
    "test": "measure a checkpoint or a pretrained model: perplexity at each length, accuracies, analyses",
    "validate": "compute the validation loss of a checkpoint",
    "probe": "check the position encoding of a pretrained model or a checkpoint",
    "parity": "compare two computations of the same tokens, by position and layer",
    "compare": "train and test several positional strategies with several seeds, and write one report",
    "extend": "select a method, such as YaRN, that extends the context length of a pretrained model",
    "export": "export a checkpoint as a model of Hugging Face transformers, as a Llama if possible",
    "predict": "continue a prompt with a trained model",
    "plan": "compute parameters, FLOPs, memory and hours of a fit before it runs",
    "inspect": "print statistics and a sample of token shards, and verify their checksums",
    "check": "check the properties of your own positional strategy",
}
TRAIN = {
    *("braceexpand", "filelock", "fsspec", "jinja2", "jsonargparse", "matplotlib", "pandas", "plotly", "psutil"),
    *("pytorch_lightning", "rich", "scipy", "tensorboard", "tokenizers", "torchmetrics", "tqdm", "webdataset"),
    "zstandard",
}
"""Packages of the group ``train`` in pyproject.toml, by the names of their modules. All commands need the group."""
PRINTING = {"predict", "inspect", "plan", "check"}  # their output is their result, so a failed write is an error
MODULES = {"check": "check_strategy", "inspect": "inspect_shards"}  # all other modules are named like their commands
COMMAND_LINES = "\n".join(f"  {name:9} {text}" for name, text in COMMANDS.items())
HELP = f"""usage: {PROGRAM} COMMAND [options]

{DESCRIPTION}

{COMMAND_LINES}

{PROGRAM} COMMAND --help lists the options of a command.
At any position, --threads N sets the number of CPU threads of each process; without this option and OMP_NUM_THREADS,
it is the number of free cores. --debug true shows the traceback of every error."""
# Threads of OpenMP that wait for work spin this often before they sleep. By default they spin for milliseconds, so that
# beside one busy process training was two to four times slower (docs/how-to/troubleshooting.md).
SPINS = "2000"


def main(arguments: list[str] | None = None) -> None:
    """Run one command.

    A wrong option, an error in the user's code, a missing package, or an error of the machine, such as a full disk or
    memory, ends the command with one line on standard error and exit status 2. Any other error is a bug and has a
    traceback. With ``--debug true``, each error has a traceback.

    Args:
        arguments: The command and its arguments; None for the arguments of the process. With None,
            `threading.excepthook` and, for most commands, the standard streams are replaced.
    """
    if arguments is None:
        arguments = sys.argv[1:]
        _prepare_process()
    if os.getcwd() not in sys.path:  # for users' own strategies; `python run.py` has the folder in the path already
        # at the end, so that its files do not replace libraries, but before the files next to run.py elsewhere
        of_program = [sys.path.pop(0)] if sys.path[0] == os.path.dirname(os.path.abspath(sys.argv[0])) else []
        sys.path += [os.getcwd(), *of_program]
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", "15")  # in a file, each update of a progress bar is a line
    debug, arguments = _take_debug(arguments)
    try:
        _run_command(_set_threads(arguments))
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        raise SystemExit(130) from None
    except SystemExit as end:
        if debug and end.__cause__:
            raise end.__cause__ from None
        raise
    except Exception as error:
        message = _user_message(error)
        if debug or message is None:
            raise
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
        raise SystemExit(2) from error
    finally:
        unlock()


def _prepare_process() -> None:
    """Use UTF-8, let idle threads sleep, and ignore errors of writing output that is not the result of the command."""
    measure_load()
    # libgomp reads the variables when torch is loaded
    if sys.platform == "linux" and not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ):
        os.environ["GOMP_SPINCOUNT"] = SPINS
    if not sys.flags.utf8_mode and locale.getencoding().upper() != "UTF-8":
        # libraries would use the encoding of the locale, which cannot represent most characters
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"PYTHONUTF8": "1"})
    threading.excepthook = _report_thread_error
    command = next(filter(COMMANDS.__contains__, sys.argv[1:]), "")  # options such as --threads may precede it
    for name in () if command in PRINTING else ("stdout", "stderr"):
        if stream := getattr(sys, name):
            file = io.BufferedWriter(_LenientFile(stream.fileno(), "w", closefd=False))
            # write_through, which PYTHONUNBUFFERED sets, would fill only the buffer of the file
            lines = stream.line_buffering or stream.write_through
            setattr(sys, name, io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=lines))


class _LenientFile(io.FileIO):
    """A file that drops output without an error if the pipe or terminal is closed or the disk is full."""

    def write(self, content: Any) -> int:
        with suppress(OSError):
            return super().write(content)
        return len(content)


def _report_thread_error(failure: threading.ExceptHookArgs) -> None:
    """Print a traceback, except for an error of the machine: TensorBoard's writer raises it in the main thread too."""
    if machine_error(failure.exc_value) is None:
        threading.__excepthook__(failure)


def _take_debug(arguments: list[str]) -> tuple[bool, list[str]]:
    """Return whether the option ``--debug`` is true, which it is without a value too, and the other arguments."""
    for place, argument in enumerate(arguments):
        if argument in ("--debug", "--debug=true", "--debug=false"):
            end = place + 1 + (argument == "--debug" and arguments[place + 1 : place + 2] in (["true"], ["false"]))
            return not arguments[end - 1].endswith("false"), arguments[:place] + arguments[end:]
    return False, arguments


def _set_threads(arguments: list[str]) -> list[str]:
    """Set the number of threads to the option ``--threads``, also for child processes. Return the other arguments."""
    for place, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if option == "--threads":
            end = place + 1 + (not equals)
            value = value if equals else "".join(arguments[place + 1 : end])
            valid = value.isdecimal() and 0 < int(value) <= 1024
            require(valid, "threads", value or "nothing", "a number from 1 to 1024")
            os.environ["OMP_NUM_THREADS"] = value
            if torch := sys.modules.get("torch"):
                torch.set_num_threads(int(value))
            return arguments[:place] + arguments[end:]
    return arguments


def _run_command(arguments: list[str]) -> None:
    if arguments[:1] in (["-h"], ["--help"], ["help"]):
        print(HELP)
        return
    if arguments[:1] == ["demo"]:
        arguments = DEMO + arguments[1:]
    arguments = with_shipped_configs(arguments)
    command = arguments[0] if arguments else "nothing"
    parts = [part for argument in arguments for part in argument.split("=", 1)]
    for option, value in pairwise(parts):  # checked before imports that take seconds
        if option in FILE_OPTIONS and value.endswith((".yaml", ".yml")) and not os.path.exists(value):
            raise UserError(f"{option}: got {value}, which does not exist; expected the path of a configuration file")
        if option in FILE_OPTIONS[:2] and os.path.isfile(value):
            read_mapping(Path(value))  # whose error names the file
        if option == "--model.position" and value.isidentifier():
            names = import_module("kerple.positions").names()
            if value not in names:
                raise unknown(option[2:], value, names)
    if command == "test" and "--hf" in parts:
        import_module("kerple.cli.measure_pretrained").main(arguments[1:])
    elif command in ("fit", "test", "validate"):
        import_module("kerple.cli.lightning").run(arguments)
    elif command in COMMANDS:
        import_module(f"kerple.cli.{MODULES.get(command, command)}").main(arguments[1:])
    else:
        raise unknown("command", command, COMMANDS)


def _user_message(error: Exception) -> str | None:
    """Return the message of an error that the user can correct, or None for a bug."""
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("kerple"):
        package = error.name.partition(".")[0]
        install = "'.[train]' in the folder of the project" if package in TRAIN else package
        return f"{package} is not installed, but this command needs it; install it with: pip install {install}"
    if type(error).__name__ == "OutOfMemoryError" and type(error).__module__.startswith("torch"):  # of a GPU
        return f"{error} Divide data.batch_size and multiply trainer.accumulate_grad_batches by the same factor"
    if isinstance(error, UserError | ArgumentError):
        return str(error)
    if message := machine_error(error):
        return message
    if user_location(error):
        return describe(error)
    class_errors = sys.modules.get("kerple.config.class_errors")  # without it, no option has selected a class
    foreign = class_errors and class_errors.foreign_error(error)
    return str(foreign) if foreign else None
