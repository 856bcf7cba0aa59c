"""`UserError`, the class of errors that a user can correct, and functions that describe an error in one line."""

import errno
import traceback
from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # the disk, the user's quota or the largest file size is exhausted

# a folder cannot be made
NO_FOLDER = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR, errno.ELOOP}

# beginnings of the paths of files that the user did not write: generated code, the standard library and this package
NOT_OF_THE_USER = ("<", str(Path(traceback.__file__).parent), str(Path(__file__).parents[1]))
PACKAGES = {"site-packages", "dist-packages"}  # folders of installed packages


class UserError(ValueError):
    """An error in the user's input: one line with the option, its value, the accepted values and what to do.

    A command prints it without a traceback and ends with status 2. `kerple.cli.main.main` also reports four other kinds
    of errors in one line: errors in the user's code, missing packages, full disks and full GPUs. All remaining
    exceptions have a traceback, because they are bugs of this project or of a library.
    """


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
