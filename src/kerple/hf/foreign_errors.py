"""`foreign_errors`: an error that a model, its code or its files raise becomes one line with the model's own words."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb

import torch

from kerple.base.errors import UserError, describe, machine_error

OURS, TORCH = f"{Path(__file__).parents[1]}/", f"{Path(torch.__file__).parent}/"


@contextmanager
def foreign_errors(failure: str, advice: str) -> Iterator[None]:
    """Turn an error of foreign code into a `UserError`, as a context manager around the call of this code.

    Foreign code is that of transformers, of a model's folder, and of the libraries that read a model's files. These
    errors pass unchanged: a `UserError`, exhausted memory or disks, and errors of functions of this project that the
    foreign code calls, because they are bugs.

    Args:
        failure: Beginning of the message: the option and what failed.
        advice: End of the message: what is expected, or what to do.

    Raises:
        UserError: With ``failure``, the type of the error, the first line of its text, and ``advice``.
    """
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # models and libraries raise errors of many classes
        # the first two frames are this function and the call; torch raises errors on behalf of its caller
        files = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)][2:]
        innermost = next((file for file in reversed(files) if not file.startswith(TORCH)), "")
        if innermost.startswith(OURS) or machine_error(error):
            raise
        raise UserError(f"{failure} ({describe(error):.300}); {advice}") from error
