"""A strategy around another one."""

from abc import abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import Any

from kerple.positions.base import FLAGS, HOOKS, Position


class Wrapper(Position):
    """Forwards every hook and copies every flag of the strategy it wraps; a subclass overrides what it changes.

    Args:
        position: The wrapped strategy.
    """

    @abstractmethod
    def __init__(self, position: Position) -> None:
        super().__init__()
        self.position = position
        for flag in FLAGS:
            setattr(self, flag, getattr(position, flag))

    def uses(self, hook: str) -> bool:
        return getattr(type(self), hook) is not getattr(Wrapper, hook) or self.position.uses(hook)


def _forwarding(hook: str) -> Callable[..., Any]:
    @wraps(getattr(Position, hook))
    def forward(self: Wrapper, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.position, hook)(*args, **kwargs)

    return forward


for _hook in HOOKS:  # one loop, so that a hook added later is not dropped in silence
    setattr(Wrapper, _hook, _forwarding(_hook))
