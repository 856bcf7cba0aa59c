"""Models of the transformers library: their evaluation, their translation to our own `Transformer`, and export.

The optional group ``hf`` (transformers, accelerate, gguf) is needed for these models only. Our own checkpoints are read
without it.
"""

from importlib.util import find_spec

from kerple.base.errors import UserError

INSTALL = 'pip install --editable ".[hf]"'
PRETRAINED = 'pip install --editable ".[pretrained]"'


def need(package: str = "transformers", install: str = INSTALL) -> None:
    """Check that a package is installed.

    Raises:
        UserError: If the package is not installed. The message has the command that installs it.
    """
    if find_spec(package) is None:
        raise UserError(f"{package}: is not installed, and this command needs it; install it with: {install}")


if find_spec("transformers") is not None:
    from kerple.hf.modeling import register

    register()  # AutoModelForCausalLM then loads our models after `import kerple.hf`
