"""Program in the process of a `Child`: runs several commands, so that a fit and its test import libraries once.

``python worker.py PROGRAM STATUS``: each line of standard input is the JSON list of a command's arguments. The command
is run as by ``PROGRAM``, and its exit status is written as a line to the file descriptor ``STATUS``. The process ends
with standard input, or with a status other than 0.
"""

import contextlib
import json
import os
import runpy
import signal
import sys
import traceback


def main() -> None:
    """Run the commands that standard input gives, until it ends or one of them fails."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and asks this process to save and end
    program, status = sys.argv[1], int(sys.argv[2])
    os.set_inheritable(status, False)
    folder = os.path.dirname(os.path.abspath(program))
    # the folder of this file or of an installed package would make their modules importable by their bare names
    sys.path[0] = os.getcwd() if os.path.exists(os.path.join(folder, "__init__.py")) else folder
    for text in sys.stdin:
        arguments = json.loads(text)
        print("$", program, *arguments, flush=True)
        code = _called(program, arguments)
        with contextlib.suppress(BrokenPipeError):  # the parent was killed; the command was finished all the same
            os.write(status, f"{code}\n".encode())
        if code:
            raise SystemExit(code)


def _called(program: str, arguments: list[str]) -> int:
    sys.argv = [program, *arguments]  # Lightning starts the other ranks of a run by this command line
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else _told(end.code)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _told(message: object) -> int:
    print(message, file=sys.stderr)
    return 1


if __name__ == "__main__":
    main()
