"""Lightning's plugin that writes checkpoints atomically, and reads and removes them safely."""

import os
from pathlib import Path
from typing import IO, Any, cast

import torch
from lightning_fabric.plugins import TorchCheckpointIO

from kerple.base.atomic import writing
from kerple.base.errors import NO_ROOM, UserError


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints by `kerple.base.atomic`, and loads only tensors and plain containers from them."""

    def __init__(self) -> None:
        self._folders: set[str] = set()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint.

        Raises:
            UserError: There is no room for it. This ends the run, because `ModelCheckpoint` would otherwise remove
                another checkpoint for one that does not exist. Earlier checkpoints are intact.
        """
        if "://" in str(path):  # object stores write a file as a whole
            super().save_checkpoint(checkpoint, path, storage_options)
            self._folders.add(str(path).rpartition("/")[0])
            return
        path = Path(path)
        try:
            _write(checkpoint, path)
            self._folders.add(os.path.realpath(path.parent))
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise UserError(
                f"no room for the checkpoint {path} ({error.strerror}); the ones saved before are intact: free some "
                "space and resume with --ckpt_path last"
            ) from error

    def load_checkpoint(
        self, path: str | Path, map_location: Any = lambda storage, _: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return super().load_checkpoint(path, map_location, weights_only=True)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove an earlier checkpoint, but only from a folder that this run has written to.

        A resumed run reads from a checkpoint which files it had kept, and would remove any file that it names.
        """
        local = "://" not in str(path)
        if local and not (os.path.isfile(path) and os.path.realpath(os.path.dirname(path)) in self._folders):
            return
        if not local and str(path).rpartition("/")[0] not in self._folders:
            return
        super().remove_checkpoint(path)


def _write(checkpoint: dict[str, Any], path: Path) -> None:
    with writing(path) as file:
        recorder = _Recorder(file)
        try:
            torch.save(checkpoint, cast("IO[bytes]", recorder))
        except RuntimeError as error:  # torch's writer hides the cause
            raise recorder.error or error from error


class _Recorder:
    """A file that records why it could not be written."""

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
