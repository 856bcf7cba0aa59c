"""`UserError`, the class of errors that a user can correct, and sets of error codes of the operating system."""

import errno
from collections.abc import Collection
from difflib import get_close_matches

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # the disk, the user's quota or the largest file size is exhausted

NO_FOLDER = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR}  # a folder cannot be made


class UserError(ValueError):
    """An error in the user's input: one line with the option, its value, the accepted values and what to do.

    A command prints it without a traceback and ends with status 2. Any other exception keeps its traceback, because it
    is a fault of this project or of a library.
    """


def unknown(option: str, name: str, names: Collection[str]) -> UserError:
    """The error about an unknown name. It suggests the most similar of the known names, or lists all of them."""
    nearest = get_close_matches(name, names, 1)
    accepted = f"did you mean {nearest[0]}?" if nearest else f"expected one of {', '.join(names)}"
    return UserError(f"{option}: got {name}, {accepted}")
