"""The entry point: `python run.py`, or `kerple`. The modules of a command are imported only when it is called."""

import io
import locale
import os
import sys
import threading
from argparse import ArgumentError
from contextlib import suppress
from importlib import import_module
from itertools import pairwise
from typing import Any

from kerple.base.directories import unlock
from kerple.base.errors import NO_ROOM, UserError, unknown
from kerple.base.shipped_configs import FILE_OPTIONS, with_shipped_configs
from kerple.cli import PROGRAM

DEMO = ["compare", "--config", "configs/compare/demo.yaml", "--parallel", "2"]
COMMANDS = {
    "demo": "train four strategies for a minute or two each, and compare them far beyond the training length",
    "prepare": "build the token shards of a data config, nothing else",
    "fit": "train a model",
    "test": "measure a checkpoint: perplexity at each length, accuracies, analyses",
    "validate": "the validation loss of a checkpoint",
    "probe": "check what the positions of a model of transformers, or of a run, really do",
    "compare": "strategies × seeds with everything else equal, and one report",
    "extend": "which extension of the context suits a pretrained model, and whether any helps",
    "export": "a run as a model of transformers, a stock Llama where it can be",
    "predict": "continue a prompt with a trained model",
    "plan": "what a fit will take: parameters, FLOPs, memory, hours, before anything runs",
    "inspect": "statistics, a decoded sample and checksums of token shards",
    "check": "check that your own positional strategy has every property",
}
PRINTING = {"predict", "inspect", "plan", "check"}  # their result is what they print; of a run it is in files
LIGHTNING = ("fit", "test", "validate")
HELP = "\n".join(
    [
        f"usage: {PROGRAM} COMMAND [options]",
        "",
        "Length extrapolation of transformers.",
        "",
        *(f"  {name:9} {text}" for name, text in COMMANDS.items()),
        "",
        f"{PROGRAM} COMMAND --help lists the options of a command.",
        "--debug, anywhere, shows the traceback of every error.",
    ]
)


def main(arguments: list[str] | None = None) -> None:
    """Run one command.

    A mistake of the user, a full disk or a full GPU ends it with one line on standard error and exit status 2. Any
    other error is a fault of this program or a library, and has a traceback. With ``--debug`` all errors have one.

    Args:
        arguments: The command and its arguments; None for those of the process.
    """
    if arguments is None and not sys.flags.utf8_mode and locale.getencoding().upper() != "UTF-8":
        # libraries read and print text in the encoding of the locale, which lacks most characters
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"PYTHONUTF8": "1"})
    if arguments is None:
        threading.excepthook = _thread_failed
    for name in ("stdout", "stderr") if arguments is None and not {*sys.argv[1:2]} & PRINTING else ():
        if stream := getattr(sys, name):
            file = io.BufferedWriter(_Dropping(stream.fileno(), "w", closefd=False))
            options = {key: getattr(stream, key) for key in ("encoding", "errors", "line_buffering", "write_through")}
            setattr(sys, name, io.TextIOWrapper(file, **options))
    if os.getcwd() not in sys.path:  # it is there with `python run.py`, but not with `kerple`
        sys.path.append(os.getcwd())  # for users' own strategies; last, so that no file there hides a library
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["demo"]:
        arguments = DEMO + arguments[1:]
    arguments = with_shipped_configs(arguments)
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", "15")  # in a file, each update of a bar is a line
    if debug := "--debug" in arguments:
        arguments.remove("--debug")
    if arguments[:1] in (["-h"], ["--help"], ["help"]):
        print(HELP)
        return
    try:
        _call(arguments)
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        raise SystemExit(130) from None
    except Exception as error:
        message = _mistake(error)
        if debug or message is None:
            raise
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
        raise SystemExit(2) from error
    finally:
        unlock()


class _Dropping(io.FileIO):
    """A file descriptor that drops what cannot be written: a pipe is closed, a terminal is gone, a disk is full."""

    def write(self, content: Any) -> int:
        with suppress(OSError):
            return super().write(content)
        return len(content)


def _thread_failed(failure: threading.ExceptHookArgs) -> None:
    """Print a traceback, unless the disk is full, which TensorBoard's writer raises in the main thread too."""
    if getattr(failure.exc_value, "errno", None) not in NO_ROOM:
        threading.__excepthook__(failure)


def _call(arguments: list[str]) -> None:
    command = arguments[0] if arguments else "nothing"
    flat = [part for argument in arguments for part in argument.split("=", 1)]
    for option, value in pairwise(flat):  # before anything that takes seconds is imported
        if option in FILE_OPTIONS and value.endswith((".yaml", ".yml")) and not os.path.exists(value):
            raise UserError(f"{option.lstrip('-')}: got {value}, which does not exist")
        if option == "--model.position" and value.isidentifier():
            names = import_module("kerple.positions").names()
            if value not in names:
                raise unknown(option[2:], value, names)
    if command == "test" and any(part == "--hf" for part in flat):
        import_module("kerple.cli.pretrained_test").main(arguments[1:])
    elif command in LIGHTNING:
        import_module("kerple.cli.fit").run(arguments, HELP.split("\n")[2])
    elif command in COMMANDS:
        import_module(f"kerple.cli.{command}").main(arguments[1:])
    else:
        raise unknown("command", command, COMMANDS)


def _mistake(error: Exception) -> str | None:
    """The message of an error that the user can mend; None for a fault of this program or a library."""
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("kerple"):
        package = error.name.partition(".")[0]
        return f"{package} is not installed, and this command needs it; install it with: pip install {package}"
    if type(error).__name__ == "OutOfMemoryError" and type(error).__module__.startswith("torch"):  # of a GPU
        return f"{error} Lower data.batch_size and raise trainer.accumulate_grad_batches by the same factor"
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return f"{error.filename or 'disk'}: {error.strerror}; free some space, what was saved before is intact"
    return str(error) if isinstance(error, UserError | ArgumentError) else None
