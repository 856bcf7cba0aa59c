"""`temporary_value`: another value of an attribute within a context."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def temporary_value(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute within the context. At its end, also after an error, the attribute has its earlier value again.

    Args:
        owner: The object with the attribute.
        name: Name of the attribute.
        value: Its value within the context.
    """
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
