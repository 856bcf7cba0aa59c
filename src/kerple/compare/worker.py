"""Runs one command line after the other in one process, so that a run's test need not import everything again.

``python worker.py PROGRAM STATUS``: a line of standard input is the JSON list of a command's arguments; it is called as
``PROGRAM`` would be, and its exit status is written to the file descriptor ``STATUS`` as a line. The end of standard
input ends the process, and so does a status other than 0.
"""

import contextlib
import json
import os
import runpy
import signal
import sys
import traceback


def main() -> None:
    """Call the command lines that standard input gives, until it ends or one of them fails."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which has us save and end
    program, status = sys.argv[1], int(sys.argv[2])
    os.set_inheritable(status, False)
    folder = os.path.dirname(os.path.abspath(program))
    # not the folder of this file, nor that of an installed package, whose modules would be found by their bare names
    sys.path[0] = os.getcwd() if os.path.exists(os.path.join(folder, "__init__.py")) else folder
    for text in sys.stdin:
        arguments = json.loads(text)
        print("$", program, *arguments, flush=True)
        code = _called(program, arguments)
        with contextlib.suppress(BrokenPipeError):  # the parent was killed; what was begun was ended all the same
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
