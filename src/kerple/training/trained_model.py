"""Loading of a trained model and its data module from a checkpoint."""

import torch
from jsonargparse import ArgumentError
from pytorch_lightning.cli import LightningArgumentParser

from kerple.base.errors import UserError
from kerple.config import untrusted_checkpoints
from kerple.config.checkpoint_agreement import check_weights
from kerple.config.class_errors import original_errors
from kerple.data import TokenShards
from kerple.tasks import TaskData
from kerple.tasks.vocabulary import END_ID
from kerple.training.allowed_classes import allowed_classes
from kerple.training.fit_options import add_model_and_data
from kerple.training.language_model import LanguageModel

TextData = TokenShards | TaskData  # data modules with the methods encode and decode


def load_trained(path: str, packages: str = "", device: str = "cpu") -> tuple[LanguageModel, TextData]:
    """Load the model of a checkpoint, in evaluation mode, and its data module.

    Args:
        path: Path of a checkpoint of `fit`.
        packages: Packages outside this project whose classes the checkpoint may use, separated by commas.
        device: Device of the model.

    Raises:
        UserError: If the checkpoint does not exist or cannot be read, or its data is missing or of another class than
            `TextData`.
    """
    config = allowed_classes(packages).config(path)
    parser = LightningArgumentParser(exit_on_error=False)
    add_model_and_data(parser)
    try:
        with original_errors(parser):
            loaded = parser.instantiate_classes(parser.parse_object({key: config[key] for key in ("model", "data")}))
    except (ArgumentError, ValueError, TypeError) as error:  # from the parser or from a class
        raise UserError(f"ckpt_path: {path}: {error}") from error
    if not isinstance(loaded.data, TextData):  # a user's own data module
        kind, expected = type(loaded.data).__name__, "a model trained on TokenShards or TaskData"
        raise UserError(f"ckpt_path: {path} was trained on {kind}, which cannot encode a prompt; expected {expected}")
    loaded.data.setup("predict")
    content = untrusted_checkpoints.load(path)
    check_weights(path, content, loaded.model)
    if (state := content.get(type(loaded.data).__qualname__)) is not None:
        loaded.data.load_state_dict(state)
    if any(weight.dtype == torch.float64 for weight in content["state_dict"].values()):
        loaded.model.double()
    loaded.model.load_state_dict(content["state_dict"])
    loaded.model.set_places(loaded.data)  # numbers that a task assigns to tokens, see `Coupled`
    loaded.model.network.restart_positions = getattr(loaded.data, "restart_positions", True)
    return loaded.model.to(device).eval(), loaded.data


def end_token(data: TextData) -> int:
    """Return the id of the token that ends a text or the answer of a task."""
    return END_ID if isinstance(data, TaskData) else data.manifest.end_of_text
