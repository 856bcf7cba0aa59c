"""`UserError`, the class of errors that a user can cause and mend, and codes of the system's errors of that kind."""

import errno
from collections.abc import Collection
from difflib import get_close_matches

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # the disk, the user's share of it, or the largest file is full

NO_FOLDER = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR}  # a folder that cannot be made


class UserError(ValueError):
    """A mistake of the user: one line with the option's name, its value, what is expected and what to do.

    It is raised where the user's input is read. The command prints it without a traceback and ends with status 2; any
    other exception keeps its traceback, because it is a fault of this project or of a library.
    """


def unknown(option: str, name: str, names: Collection[str]) -> UserError:
    """The error about a name that does not exist; it suggests the most similar of those that do, or lists all."""
    nearest = get_close_matches(name, names, 1)
    accepted = f"did you mean {nearest[0]}?" if nearest else f"expected one of {', '.join(names)}"
    return UserError(f"{option}: got {name}, {accepted}")
