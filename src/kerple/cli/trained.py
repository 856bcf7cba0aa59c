"""Loading of a trained model and its data module from a checkpoint."""

from jsonargparse import ArgumentError
from pytorch_lightning.cli import LightningArgumentParser

from kerple.base import trust
from kerple.base.errors import UserError
from kerple.cli.agreement import check_weights
from kerple.cli.classes import classes
from kerple.cli.parser import add_model_and_data, original_errors
from kerple.data import TokenShards
from kerple.tasks import TaskData
from kerple.training.language_model import LanguageModel

TextData = TokenShards | TaskData  # data modules that can encode and decode


def load_trained(path: str, packages: str = "", device: str = "cpu") -> tuple[LanguageModel, TextData]:
    """Load the model of a checkpoint, in evaluation mode, and its data module, which can encode and decode.

    Args:
        path: Path of a checkpoint of `fit`.
        packages: Further packages whose classes it may use, separated by commas.
        device: Device of the model.

    Raises:
        UserError: If the checkpoint does not exist or cannot be read, or its data is missing.
    """
    config = classes(packages).config(path)
    parser = LightningArgumentParser(exit_on_error=False)
    add_model_and_data(parser)
    try:
        with original_errors(parser):
            loaded = parser.instantiate_classes(parser.parse_object({key: config[key] for key in ("model", "data")}))
    except (ArgumentError, ValueError, TypeError) as error:  # from the parser or from a class
        raise UserError(f"ckpt_path: {path}: {error}") from error
    if not isinstance(loaded.data, TextData):  # a user's own data module
        raise UserError(f"ckpt_path: {path} was trained on {type(loaded.data).__name__}, which cannot encode a prompt")
    loaded.data.setup("predict")
    content = trust.load(path)
    check_weights(path, content, loaded.model)
    if (state := content.get(type(loaded.data).__qualname__)) is not None:
        loaded.data.load_state_dict(state)
    loaded.model.load_state_dict(content["state_dict"])
    loaded.model.set_places(loaded.data)
    return loaded.model.to(device).eval(), loaded.data


def end_token(data: TextData) -> int:
    """Id of the token that ends a text or an answer."""
    return data.end if isinstance(data, TaskData) else data.manifest.end_of_text
