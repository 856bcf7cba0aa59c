"""A plugin for Lightning that writes checkpoints atomically, and reads and removes them safely."""

import os
from pathlib import Path
from typing import IO, Any, cast

import torch
from lightning_fabric.plugins import TorchCheckpointIO

from kerple.base.atomic import writing
from kerple.base.errors import NO_FOLDER, UserError


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints with `kerple.base.atomic`, and loads only tensors and plain containers from them."""

    def __init__(self) -> None:
        self._folders: set[str] = set()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint.

        Raises:
            UserError: If the folder cannot be made.
            OSError: If the checkpoint cannot be written. Earlier checkpoints are intact. The error must end the run.
                If the run continued, `ModelCheckpoint` would remove an earlier one, although the new one is missing.
        """
        if "://" in str(path):  # an object store replaces files atomically
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                if error.errno in NO_FOLDER:
                    reason = f"the folder of {path} cannot be made ({error.strerror}); choose another one"
                    raise UserError(f"trainer.callbacks: {reason}") from error
                raise
            with writing(Path(path)) as file:
                try:
                    torch.save(checkpoint, cast("IO[bytes]", file))
                except RuntimeError:  # torch hides the reason; another write raises the error of the operating system
                    file.write(bytes(2**20))
                    file.flush()
                    raise
        self._folders.add(_folder(path))

    def load_checkpoint(
        self, path: str | Path, map_location: Any = lambda storage, _: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return super().load_checkpoint(path, map_location, weights_only=True)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint, but only from a folder to which this object has written a checkpoint.

        Each checkpoint contains the paths that `ModelCheckpoint` will remove later. A resumed run reads these paths. A
        forged checkpoint could therefore name any file or folder.
        """
        if _folder(path) in self._folders and not os.path.isdir(path):
            super().remove_checkpoint(path)


def _folder(path: str | Path) -> str:
    # for an address in an object store, this is a local path that does not exist, but still identifies the folder
    return os.path.realpath(os.path.dirname(path))
