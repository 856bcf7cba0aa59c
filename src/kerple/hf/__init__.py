"""Models of others: evaluated as they are, read into our own Transformer, and written for others to read.

Needs the optional group ``hf`` (transformers, accelerate, gguf); nothing outside this package imports it before a
command asks for it.
"""

from importlib.util import find_spec

from kerple.errors import UserError

INSTALL = 'pip install "kerple[hf]"'


def need(package: str = "transformers", install: str = INSTALL) -> None:
    """Complain with the line that installs a package, if it is missing.

    Raises:
        UserError: If there is no such package here.
    """
    if find_spec(package) is None:
        raise UserError(f"{package}: is not installed, and this command needs it; install it with: {install}")


if find_spec("transformers") is not None:
    from kerple.hf.modeling import register

    register()  # so that `import kerple.hf` is all that AutoModelForCausalLM needs
