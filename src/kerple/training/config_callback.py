"""`StoreConfig`: a callback that stores the resolved configuration in the folder and the checkpoints of a run."""

import re
from functools import cached_property
from typing import Any, cast

import yaml
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.cli import SaveConfigCallback

from kerple.base.atomic import write
from kerple.base.errors import UserError
from kerple.config.checkpoint_agreement import SAMPLES_PER_STEP
from kerple.config.flat_configuration import flat
from kerple.config.untrusted_checkpoints import CONFIG
from kerple.config.user_code_digests import SOURCE_DIGESTS, source_digests
from kerple.training.trainer_access import accumulation_option, log_directory


class StoreConfig(SaveConfigCallback):
    """Writes the resolved configuration into each checkpoint, and to ``config.yaml`` in the run's folder.

    An existing file is kept. A resumed run with another configuration writes ``config-resumed-1.yaml``, and so on.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # not at each checkpoint, because the user may edit the files of the classes during the fit
        self.source_digests = source_digests(flat(yaml.safe_load(self.text)))
        directory = log_directory(trainer)  # log_directory broadcasts, so every rank must call it
        if self.already_saved or not trainer.is_global_zero:
            return
        self.already_saved = True
        path = directory / "config.yaml"
        resumption = 0
        while path.exists() and path.read_text(encoding="utf-8") != self.text:
            resumption += 1
            path = directory / f"config-resumed-{resumption}.yaml"
        write(path, self.text)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[CONFIG] = yaml.safe_load(self.text)
        checkpoint[SAMPLES_PER_STEP] = samples_per_step(trainer)
        checkpoint[SOURCE_DIGESTS] = self.source_digests

    @cached_property
    def text(self) -> str:
        """The resolved configuration as YAML.

        Raises:
            UserError: If the value of an option cannot be written, so that the fit could not be continued.
        """
        text = self.parser.dump(self.config, skip_none=False)
        if unwritten := re.search(r"(\w+): .?Unable to serialize instance (.*)", text):  # by jsonargparse
            option, value = unwritten.groups()
            raise UserError(f"{option}: got {value}, which config.yaml cannot contain; set it to a number or a string")
        return text


def samples_per_step(trainer: Trainer, data: Any = None) -> int | None:
    """Return the number of training samples per step over all devices and micro-batches.

    Args:
        trainer: The Trainer.
        data: The data module; None for that of the Trainer.

    Returns:
        The number, or None if the data has no ``batch_size``.
    """
    size = getattr(data or cast(Any, trainer).datamodule, "batch_size", None)
    return None if size is None else size * accumulation_option(trainer) * trainer.world_size
