"""A replacement of Ray with the same names, which runs each task in the calling process."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class Inline(SimpleNamespace):
    exceptions = SimpleNamespace(RayError=ConnectionError, RayTaskError=ConnectionError)

    def __init__(self) -> None:
        super().__init__(sent=0, init=lambda **_: None, shutdown=lambda: None, is_initialized=lambda: False)
        self.cluster_resources = lambda: {"CPU": 2.0}
        self.get = lambda reference: reference()
        self.wait = lambda waiting, **_: (waiting[:1], waiting[1:])

    def remote(self, **_: Any) -> Callable[[Callable[..., Any]], Any]:
        def send(task: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
            self.sent += 1
            result = task(*arguments)
            return lambda: result

        return lambda task: SimpleNamespace(remote=lambda *arguments: send(task, *arguments))
