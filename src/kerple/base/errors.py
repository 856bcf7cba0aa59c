"""`UserError`, the class of errors that a user can correct, and functions that describe an error in one line."""

import errno
import os
import traceback
from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # the disk, the user's quota or the largest file size is exhausted

# errors of memory, limits and file systems, which are not errors of this project; a missing file is none of them
OF_MACHINE = NO_ROOM | {errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.EIO, errno.EACCES, errno.EPERM}
OF_MACHINE |= {errno.EROFS, errno.EBUSY, errno.ENOLCK, errno.ENOTSUP, errno.ESTALE, errno.ETIMEDOUT, errno.ELOOP}
OF_MACHINE |= {errno.ENAMETOOLONG}
# parts of messages of libraries that hide the number of the error
HIDDEN = {"allocate memory": errno.ENOMEM, "bad_alloc": errno.ENOMEM, "failed to map segment": errno.ENOMEM}
HIDDEN |= {"can't start new thread": errno.EAGAIN, "ancdata": errno.EMFILE, "PytorchStreamWriter failed": errno.EIO}
ADVICE = dict.fromkeys(NO_ROOM, "free some space; earlier files are intact")
ADVICE[errno.ENOMEM] = "decrease data.batch_size, the lengths or the model, or raise the limit of memory (ulimit -v)"
ADVICE |= dict.fromkeys([errno.EMFILE, errno.ENFILE], "raise the limit (ulimit -n), or use fewer workers")
ADVICE[errno.EAGAIN] = "raise the limit of processes and threads (ulimit -u), or use fewer of them"

# a folder cannot be made
NO_FOLDER = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR, errno.ELOOP}

# beginnings of the paths of files that the user did not write: generated code, the standard library and this package
NOT_OF_THE_USER = ("<", str(Path(traceback.__file__).parent), str(Path(__file__).parents[1]))
PACKAGES = {"site-packages", "dist-packages"}  # folders of installed packages


class UserError(ValueError):
    """An error in the user's input: one line with the option, its value, the accepted values and what to do.

    A command prints it without a traceback and ends with status 2. `kerple.cli.main.main` also reports three other
    kinds of errors in one line: errors in the user's code, missing packages, and errors of the machine, such as a full
    disk or memory. All remaining exceptions have a traceback, because they are bugs of this project or of a library.
    """


def require(valid: bool, option: str, value: object, expected: str) -> None:
    """Raise a UserError about the ``value`` of an ``option`` unless it is ``valid``.

    Args:
        valid: Whether the value is accepted.
        option: The option, after the name of its object or command if there is one, such as ``Alibi: slope``.
        value: The given value.
        expected: The accepted values, and what to do.
    """
    if not valid:
        raise UserError(f"{option}: got {value}, expected {expected}")


def unknown(option: str, name: str, names: Collection[str]) -> UserError:
    """Return the error about an unknown name. It suggests the most similar name, or lists all if none is similar."""
    nearest = get_close_matches(name, names, 1)
    accepted = f"did you mean {nearest[0]}?" if nearest else f"expected one of {', '.join(names)}"
    return UserError(f"{option}: got {name}, {accepted}")


def user_location(error: BaseException) -> str:
    """Return ``file:line`` of the user's code from the traceback of an error or of its causes, or an empty string.

    The location is the innermost call that is not in this package, an installed package or the standard library. If
    several errors in the chain of causes have such a call, the location is from the one that was raised first.
    """
    cause: BaseException | None = error
    location = ""
    seen = list[BaseException]()
    while cause is not None and cause not in seen:  # an error can be among its own causes
        seen.append(cause)
        calls = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(cause.__traceback__)]
        if isinstance(cause, SyntaxError):  # no frame of its traceback is in the file
            calls.append((str(cause.filename), cause.lineno))
        for file, line in calls:
            if not file.startswith(NOT_OF_THE_USER) and not PACKAGES & set(Path(file).parts):
                location = f"{file}:{line}"
        cause = cause.__cause__ or cause.__context__
    return location


def machine_error(error: BaseException | None) -> str | None:
    """Return one line about an error of memory, a limit or a file system (`OF_MACHINE`); None for any other error.

    torch, safetensors and tokenizers report such errors in messages of other classes, and so does a loader for the
    error of its worker.
    """
    text = str(error)
    number = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)
    if number is None and isinstance(error, Exception) and not isinstance(error, UserError):
        forms = {n: (f"[Errno {n}]", f"(os error {n})", f"{os.strerror(n)} ({n})") for n in OF_MACHINE}
        number = next((n for n, of_number in forms.items() if any(form in text for form in of_number)), None)
        number = number or next((n for part, n in HIDDEN.items() if part in text), None)
    if number not in OF_MACHINE:
        return None
    name = getattr(error, "filename", None) or ("memory" if number == errno.ENOMEM else "file system")
    advice = ADVICE.get(number, "check this path and its disk; earlier files are intact")
    return f"{name}: {os.strerror(number)}; {advice}"


def describe(error: BaseException) -> str:
    """Return an error as one line: its location in the user's code, its type and the first line of its message.

    The type is left out for assertions and `UserError`.
    """
    kind = "" if isinstance(error, AssertionError | UserError) else type(error).__name__
    return ": ".join(filter(None, [user_location(error), kind, *str(error).strip().splitlines()[:1]]))


def compiler_error(error: Exception) -> UserError:
    """Return an error of torch.compile as a UserError. Its second line may be the message of a backend."""
    message = " ".join(str(error).strip().splitlines()[:2])
    return UserError(f"model.compile: {type(error).__name__}: {message}; correct it, or set it to false")
