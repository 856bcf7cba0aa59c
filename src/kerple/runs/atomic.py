"""How a checkpoint gets to the disk: whole, or not at all."""

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins import TorchCheckpointIO
from pytorch_lightning.utilities.rank_zero import rank_zero_warn

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a temporary file in the same folder, flushes it to the disk and renames it over the previous one.

    A kill at any moment leaves the previous file or the new one, never a part. Where there is no room for the new one,
    the previous stays, a warning says so, `failure` holds the error until a later one is written, and nothing is
    removed meanwhile. A run is not ended by it: what it has not saved yet would be lost for certain.

    Loading never unpickles anything but tensors and plain containers.
    """

    def __init__(self) -> None:
        self.failure: OSError | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if "://" in str(path):  # object stores write a file as a whole
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(path)
        try:
            _write(checkpoint, path)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            self.failure = error
            kept = "the previous one is intact" if path.exists() else "there is no earlier one"
            rank_zero_warn(f"No room for the checkpoint {path} ({error.strerror}); {kept}. Free some space.")
        else:
            self.failure = None

    def load_checkpoint(
        self, path: str | Path, map_location: Any = lambda storage, _: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return super().load_checkpoint(path, map_location, weights_only=True)

    def remove_checkpoint(self, path: str | Path) -> None:
        if self.failure is None:
            super().remove_checkpoint(path)


def _write(checkpoint: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for left_over in path.parent.glob(f".{path.name}.*"):  # of a run that was killed while it wrote
        left_over.unlink(missing_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            recorder = _Recorder(file)
            try:
                torch.save(checkpoint, recorder)
            except RuntimeError as error:  # torch's writer hides the reason
                raise recorder.error or error from error
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename is an entry of the folder
    finally:
        os.close(folder)


class _Recorder:
    """A file that remembers why it could not be written."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
